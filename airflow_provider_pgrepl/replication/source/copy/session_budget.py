"""How many sessions the copies of a snapshot may open at the source."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.source.connection import Connection, row, source_errors

# `reserved_connections` is there from 16 on. Walsenders of other kinds than ours have slots of their own.
_FREE = """
SELECT pg_catalog.current_setting('max_connections')::int
    - pg_catalog.current_setting('superuser_reserved_connections')::int
    - coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)
    - (SELECT coalesce(sum(numbackends), 0)::int FROM pg_catalog.pg_stat_database)
"""


def copy_sessions(connection: Connection) -> int:
    """Return half of the connections that the server has free now, at least 1.

    Spark runs as many tasks at once as it has cores: the sessions of a large cluster would leave the
    application none.
    """
    with source_errors("asking for free connections"):
        free: int = row(connection, _FREE)[0]
    return max(1, free // 2)
