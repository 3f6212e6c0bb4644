"""Delta tables as files: log, checkpoints, one writer."""
