"""The changelog: an append-only Delta table of every committed change, with values as the server's text."""
