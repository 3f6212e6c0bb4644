"""Reading tables as of a point in time."""
