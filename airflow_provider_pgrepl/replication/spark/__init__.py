"""Spark: sessions and their settings, connectors, executors."""
