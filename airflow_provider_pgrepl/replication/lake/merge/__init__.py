"""Merging of changelog rows into a lake table."""
