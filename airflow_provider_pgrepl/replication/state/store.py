"""The store of intent, table states and progress: schema `_pgrepl` in PostgreSQL.

Every method is one short autocommit statement, so that nothing here ever holds back the source's vacuum.
"""

from __future__ import annotations

import hashlib
import os
import socket
from contextlib import suppress
from datetime import datetime
from typing import Literal

from airflow_provider_pgrepl.errors import PgReplError, SlotBusyError
from airflow_provider_pgrepl.replication.source.connection import row, rows
from airflow_provider_pgrepl.replication.state import migrations
from airflow_provider_pgrepl.replication.state.connection import state_errors
from airflow_provider_pgrepl.replication.state.pipelines import PipelineRecord, PipelineRecords
from airflow_provider_pgrepl.replication.state.progress_records import ProgressRecords
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableRecords

__all__ = ["PipelineRecord", "Purpose", "Store", "TableRecord"]

Purpose = Literal["replicate", "snapshot"]

_HOLDER = """
SELECT a.application_name, a.pid, coalesce(pg_catalog.host(a.client_addr), 'no address'),
    a.backend_start::timestamptz(0)::text
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND (l.classid::bigint << 32 | l.objid::bigint) = %s
"""


class Store(PipelineRecords, TableRecords, ProgressRecords):
    """A connection to the state database. Its advisory locks last as long as it does.

    Raises SourceConnectionError when the database cannot be reached or the connection is lost, and StateError
    when the schema is missing.
    """

    def migrate(self) -> None:
        """Set the schema up, or bring it to this version; see `migrations.migrate`."""
        migrations.migrate(self._connection)

    def is_set_up(self) -> bool:
        """Whether the schema is there, of whatever version. Raises StateError for a newer one."""
        return migrations.is_set_up(self._connection)

    def remove_schema(self) -> bool:
        """Take the schema away when no pipeline is recorded in it any more; whether there is none now."""
        return migrations.remove_schema(self._connection)

    def now(self) -> datetime:
        """The clock of the state database, by which everything in it is dated."""
        with state_errors("asking for the time"):
            found: datetime = row(self._connection, "SELECT pg_catalog.clock_timestamp()")[0]
        return found

    def close(self) -> None:
        """Release the locks and close the connection. May be called again."""
        # The next process may follow right behind, before the server has noticed that this one is gone.
        with suppress(PgReplError), state_errors("releasing the locks"):
            rows(self._connection, "SELECT pg_catalog.pg_advisory_unlock_all()")
        super().close()

    def lock(self, pipeline: str, purpose: Purpose) -> None:
        """Take the pipeline's lock for this purpose until `unlock` or `close`.

        Raises SlotBusyError naming the holder. Polite only: what stops a second writer is in the lake.
        """
        name = f"pgrepl {purpose} {pipeline} {socket.gethostname()}:{os.getpid()}"
        key = _lock_key(pipeline, purpose)
        with state_errors("taking the pipeline's lock"):
            row(self._connection, "SELECT pg_catalog.set_config('application_name', %s, false)", (name[:63],))
            taken = row(self._connection, "SELECT pg_catalog.pg_try_advisory_lock(%s)", (key,))[0]
            holders = [] if taken else rows(self._connection, _HOLDER, (key,))
        if not taken:
            who = "; ".join(
                f"{application} (database pid {pid}, from {address}, since {since})"
                for application, pid, address, since in holders
            )
            raise SlotBusyError(
                f"pipeline {pipeline}: another process does {purpose} already: {who or 'it has just ended'}",
                "stop it first, or wait until it has ended",
            )

    def unlock(self, pipeline: str, purpose: Purpose) -> None:
        """Release a lock that `lock` took."""
        with state_errors("releasing the pipeline's lock"):
            row(self._connection, "SELECT pg_catalog.pg_advisory_unlock(%s)", (_lock_key(pipeline, purpose),))


def _lock_key(pipeline: str, purpose: str) -> int:
    digest = hashlib.blake2b(f"pgrepl {purpose} {pipeline}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1
