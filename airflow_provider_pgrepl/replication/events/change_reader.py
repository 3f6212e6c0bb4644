"""ChangeReader: a pipeline's changes with typed values, some at a time."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.beginning import After
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.changes import TypedChanges
from airflow_provider_pgrepl.replication.events.fault import for_readers
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


class ChangeReader(OrderedReader[Change]):
    """What `stream` gives, without asyncio. Arguments and errors are those of `stream`."""

    def __init__(
        self,
        lake: str | Path | Pipeline,
        tables: Collection[str] | TableSelection | None = None,
        *,
        after: After = None,
    ) -> None:
        super().__init__(lake, tables, after=after, make=TypedChanges)

    def read_next(self) -> list[Change] | None:
        """Likewise. Errors of changes say how to go on without these."""
        try:
            return super().read_next()
        except PgReplError:
            if self.fault is None:
                raise
        raise for_readers(self.fault)
