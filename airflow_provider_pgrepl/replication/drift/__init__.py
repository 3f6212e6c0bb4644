"""What became of a table since its lake table was made, and whether that can be followed. Pure."""
