"""The applier: batches of changelog commits, merge tasks for lake tables, and the position of each table."""
