"""One commit of a slice of changes to its lake table: the ways to make it, all with the slice's position."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.table import TableMerger

from airflow_provider_pgrepl.replication.lake.statistics import writer_properties
from airflow_provider_pgrepl.replication.lake.table import (
    Result,
    commit_nothing,
    commit_properties,
    fenced,
    relation_marks,
)
from airflow_provider_pgrepl.replication.lsn import LSN

MISSING = "a row to be updated or deleted is missing: the lake table is not as this pipeline left it"
_DIVISION = "Divide by zero"


@dataclass(frozen=True)
class SliceCommit:
    """The commit that brings `table`, through this very handle, to `position`. Only one method is called.

    `relation_version`: of the relation in force at the position.

    All raise FencedError when another process has written the table, LakeTableError, LakeUnavailableError.
    """

    table: DeltaTable
    app: str
    position: LSN
    commit_ts: datetime | None
    relation_version: int

    @property
    def _properties(self) -> CommitProperties:
        marks = relation_marks(self.table, self.relation_version)
        return commit_properties(self.app, self.position, "changes", self.commit_ts, marks)

    @property
    def _writer(self) -> WriterProperties:
        return writer_properties(pa.schema(self.table.schema().to_arrow()), compression="SNAPPY")

    def read(self, reading: Callable[[], Result]) -> Result:
        """Read the table as it is before the commit."""
        before = LSN(self.table.transaction_version(self.app))
        return fenced(self.table, self.app, before, reading)

    def nothing(self) -> None:
        """The position moves, the data stay."""
        commit_nothing(self.table, self.app, self.position, self._properties)

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        ordered = rows.select([field.name for field in self.table.schema().fields])
        write = partial(
            write_deltalake, mode=mode, commit_properties=self._properties, writer_properties=self._writer
        )
        fenced(self.table, self.app, self.position, lambda: write(self.table, ordered))

    def merge(self, source: pa.Table, conditions: Iterable[str]) -> TableMerger:
        """A MERGE of `source`, as s, into the table, as t; `run` commits it."""
        return self.table.merge(
            source,
            " and ".join(conditions),
            source_alias="s",
            target_alias="t",
            commit_properties=self._properties,
            writer_properties=self._writer,
        )

    def run(self, merger: TableMerger) -> dict[str, Any]:
        """Commit a MERGE, which may divide by zero to say that a row is missing; returns its metrics."""

        def execute() -> dict[str, Any]:
            before = self.table.version()
            metrics: dict[str, Any] = merger.execute()
            if self.table.version() == before:
                # Delta commits no MERGE that changes nothing.
                self.nothing()
            return metrics

        return fenced(self.table, self.app, self.position, execute, known={_DIVISION: MISSING})
