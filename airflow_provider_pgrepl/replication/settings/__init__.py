"""The pipeline file: its settings, their parsing and their validation."""
