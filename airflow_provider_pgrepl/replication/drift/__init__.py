"""Drift: how a table changed since its lake table was made, and whether that can be followed. Pure."""
