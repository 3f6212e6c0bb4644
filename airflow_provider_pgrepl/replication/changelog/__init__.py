"""The changelog: every committed change of all tables, as the server's text, in one append-only Delta table."""
