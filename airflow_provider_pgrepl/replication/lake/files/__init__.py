"""Merge on read: deletion vectors, which rows they mark, and the commits that bring them."""
