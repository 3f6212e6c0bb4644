"""Schema evolution of lake tables: the relation of each change, and the translation of rows and tables."""
