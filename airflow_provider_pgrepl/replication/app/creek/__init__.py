"""A pipeline in the place of a creek deployment, and programs for its consumers."""
