"""Reading tables as of a moment."""
