"""What the source says of itself: server, tables, and how far its WAL has come."""

from __future__ import annotations

import time
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import Connection, row, source_errors
from airflow_provider_pgrepl.replication.source.relations import find_relation, read_relation, read_relations
from airflow_provider_pgrepl.replication.source.selection import resolve_tables

__all__ = [
    "Server",
    "find_relation",
    "read_relation",
    "read_relations",
    "read_server",
    "resolve_tables",
    "wal_lsn",
]

_SERVER = """
SELECT pg_catalog.current_setting('server_version_num')::int,
    (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
    CASE WHEN pg_catalog.pg_is_in_recovery()
        THEN coalesce((SELECT received_tli FROM pg_catalog.pg_stat_get_wal_receiver()),
                      (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()))
        ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()),
                                       1, 8))::bit(32)::int
    END,
    coalesce(pg_catalog.current_setting('effective_wal_level', true),
             pg_catalog.current_setting('wal_level')),
    pg_catalog.pg_is_in_recovery()
"""

_FLUSH_WAIT_S = 1.0


@dataclass(frozen=True)
class Server:
    """Which PostgreSQL cluster this is. `system_identifier` and `timeline` tell it from a copy of it."""

    version_num: int
    system_identifier: str
    timeline: int
    wal_level: str
    in_recovery: bool


def read_server(connection: Connection) -> Server:
    """Raises SourceError."""
    with source_errors("asking the server who it is"):
        return Server(*row(connection, _SERVER))


def wal_lsn(connection: Connection) -> LSN:
    """An LSN at or after every transaction committed before this call, and which a walsender surely reaches.

    The insert LSN alone may lie beyond the last record, where no walsender ever gets; the flush LSN alone may
    lie before an asynchronous commit. So: the flush LSN, once it has reached the insert LSN of now.
    On a standby the replay LSN.
    """
    with source_errors("asking for the WAL position"):
        if row(connection, "SELECT pg_catalog.pg_is_in_recovery()")[0]:
            return LSN.parse(row(connection, "SELECT pg_catalog.pg_last_wal_replay_lsn()::text")[0])
        inserted = LSN.parse(row(connection, "SELECT pg_catalog.pg_current_wal_insert_lsn()::text")[0])
        deadline = time.monotonic() + _FLUSH_WAIT_S
        while True:
            flushed = LSN.parse(row(connection, "SELECT pg_catalog.pg_current_wal_flush_lsn()::text")[0])
            if flushed >= inserted or time.monotonic() >= deadline:
                return flushed
            time.sleep(0.02)
