"""What is asked of server, role and tables before anything begins."""
