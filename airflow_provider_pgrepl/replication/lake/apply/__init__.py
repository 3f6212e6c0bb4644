"""From the changelog to lake tables: batches, tasks, and up to where each table is whole."""
