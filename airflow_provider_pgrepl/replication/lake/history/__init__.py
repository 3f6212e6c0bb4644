"""Past versions of rows, in a table next to the lake table."""
