"""Spark sessions and their settings, connectors, and executors."""
