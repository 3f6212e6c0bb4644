"""The process and its host."""
