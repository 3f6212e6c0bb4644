"""PostgreSQL's words: names, LSNs, relations."""
