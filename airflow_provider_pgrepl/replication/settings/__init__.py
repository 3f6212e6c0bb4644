"""The pipeline file: read, and checked."""
