"""A pipeline that replaces a creek deployment, and programs for its consumers."""
