"""Table states, progress, and their store: the schema `_pgrepl` in PostgreSQL."""
