"""The status of a pipeline, its periodic summary, and their texts."""
