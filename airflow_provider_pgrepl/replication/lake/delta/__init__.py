"""Lake tables as Delta tables: data files, their statistics, commits, ownership, and vacuum."""
