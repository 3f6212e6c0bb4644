"""The demo and what it shares with tests and benchmarks: an embedded PostgreSQL server."""
