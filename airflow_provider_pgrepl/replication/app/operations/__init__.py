"""What operators of a pipeline ask for: tables paused, retried, removed; a skip; the end of it all."""
