"""The checks of server, role and tables before replication begins."""
