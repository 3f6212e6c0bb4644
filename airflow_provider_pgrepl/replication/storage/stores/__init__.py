"""Stores of each kind, as the three libraries that read and write a lake want them opened."""
