"""One commit of a slice of changes to its lake table: the ways to make it, all with the slice's position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.table import TableMerger

from airflow_provider_pgrepl.replication.lake.delta.fenced_commits import (
    Result,
    bounded_columns,
    commit_nothing,
    commit_properties,
    fenced,
    narrow_bounds,
)
from airflow_provider_pgrepl.replication.lake.delta.statistics import has_safe_bounds, writer_properties
from airflow_provider_pgrepl.replication.lake.delta.table import relation_marks
from airflow_provider_pgrepl.replication.lsn import LSN

MISSING = "a row to be updated or deleted is missing: the lake table is not as this pipeline left it"
_DIVISION = "Divide by zero"


@dataclass(frozen=True)
class SliceCommit:
    """The commit that brings `table`, through this very handle, to `position`. Only one method is called.

    `relation_version`: of the effective relation at the position.

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

    def _writer(self, values: Mapping[str, pa.ChunkedArray]) -> WriterProperties:
        """For a commit that brings these values into the columns."""
        bounded = bounded_columns(self.table, self.app)
        safe = [name for name in bounded if name not in values or has_safe_bounds(values[name])]
        return writer_properties(narrow_bounds(self.table, self.app, safe), compression="SNAPPY")

    def read(self, reading: Callable[[], Result]) -> Result:
        """Read the table as it is before the commit."""
        before = LSN(self.table.transaction_version(self.app))
        return fenced(self.table, self.app, before, reading)

    def nothing(self) -> None:
        """The position moves, the data stay."""
        commit_nothing(self.table, self.app, self.position, self._properties)

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        ordered = rows.select([field.name for field in self.table.schema().fields])
        writer = self._writer(dict(zip(ordered.column_names, ordered.columns, strict=True)))
        write = partial(
            write_deltalake, mode=mode, commit_properties=self._properties, writer_properties=writer
        )
        fenced(self.table, self.app, self.position, lambda: write(self.table, ordered))

    def merge(self, source: pa.Table, conditions: Iterable[str], names: Sequence[str]) -> TableMerger:
        """A MERGE of `source`, as s, into the table, as t; `run` commits it.

        What the columns `names` are to hold stands in the source's columns c0, c1 and so on.
        """
        writer = self._writer({name: source[f"c{index}"] for index, name in enumerate(names)})
        return self.table.merge(
            source,
            " and ".join(conditions),
            source_alias="s",
            target_alias="t",
            commit_properties=self._properties,
            writer_properties=writer,
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
