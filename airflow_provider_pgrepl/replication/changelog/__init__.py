"""The changelog: each committed change of all tables, as the server's text, in an append-only Delta table."""
