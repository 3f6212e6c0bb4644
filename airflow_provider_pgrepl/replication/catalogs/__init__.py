"""Catalogs of tables: Spark's, and Unity Catalog."""
