"""Delta tables as files: reading, committing, bounds, compaction, and what others wrote."""
