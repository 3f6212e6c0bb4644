"""Changes of a batch into a lake table."""
