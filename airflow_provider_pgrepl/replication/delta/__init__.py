"""The files of Delta tables: commits of a single writer, checkpoints, recovery after a crash."""
