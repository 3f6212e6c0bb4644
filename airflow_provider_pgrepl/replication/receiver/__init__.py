"""From the slot to the durable changelog. Only what is in here confirms an LSN to the slot."""
