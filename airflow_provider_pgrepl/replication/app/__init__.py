"""The programs snapshot, replicate and status, which combine the other packages and return exit codes."""
