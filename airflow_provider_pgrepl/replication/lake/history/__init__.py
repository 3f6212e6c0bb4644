"""Past versions of rows, in a table beside the lake table."""
