"""The snapshot that a temporary slot exports, for as long as it is held."""

from __future__ import annotations

import contextlib
from datetime import datetime
from types import TracebackType

import psycopg2

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection


class ExportedSnapshot:
    """A temporary slot's snapshot: what every transaction before `consistent_point` left behind.

    Lives as long as this object's replication connection idles: import it, then close, and the slot goes.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        *,
        consistent_point: LSN,
        snapshot: str,
        exported_at: datetime,
    ) -> None:
        self._connection = connection
        self.name = name
        self.consistent_point = consistent_point
        self.snapshot = snapshot
        self.exported_at = exported_at

    def close(self) -> None:
        """End the snapshot's export, and drop the slot. May be called again."""
        if self._connection.closed:
            return
        with contextlib.suppress(psycopg2.Error):
            # Closing the connection drops it too, but some time later.
            self._connection.cursor().execute(f"DROP_REPLICATION_SLOT {quote_identifier(self.name)}")
        self._connection.close()

    def __enter__(self) -> ExportedSnapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
