"""The receiver, from slot to durable changelog. Only this package confirms received LSNs to the slot."""
