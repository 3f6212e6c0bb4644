"""PostgreSQL's terms: names, LSNs, OIDs, relations."""
