"""Drift: the changes of a source table since its lake table was built, and the lake's response. No side
effects."""
