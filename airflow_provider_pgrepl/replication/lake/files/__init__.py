"""Data files of lake tables: search of rows, commits with deletion vectors, and compaction."""
