"""One commit of a slice of changes to its lake table: the ways to make it, all with the slice's position."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.table import TableMerger

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.choices import Merge
from airflow_provider_pgrepl.replication.lake.delta.fenced_commits import (
    Result,
    bounded_columns,
    commit_files,
    commit_nothing,
    commit_properties,
    fenced,
    narrow_bounds,
    replace_files,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.log_entry import VersionTakenError, can_commit
from airflow_provider_pgrepl.replication.lake.delta.partitions import files_beside, is_partitioned
from airflow_provider_pgrepl.replication.lake.delta.statistics import has_safe_bounds, writer_properties
from airflow_provider_pgrepl.replication.lake.delta.table import FENCED_HINT, read_position, relation_marks
from airflow_provider_pgrepl.replication.lake.vectors.file_rows import FileRows, Places
from airflow_provider_pgrepl.replication.lake.vectors.marking import replace_rows, rewrite_files
from airflow_provider_pgrepl.replication.lsn import LSN

MISSING = "a row to be updated or deleted is missing: the lake table is not as this pipeline left it"
_DIVISION = "Divide by zero"

_ATTEMPTS = 10
_NO_ROWS = np.empty(0, np.int64)
_CHEAP_BYTES = 256 << 10
_WORTH_REWRITING = 4
"""By how many times the bytes of a change a rewrite may exceed them, and also leaves nothing to clean up."""


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
    strategy: Merge = "auto"

    def make(self, how: Callable[[], None]) -> None:
        """Call `how`, which makes the commit from what the table holds; again when somebody was faster.

        Who may be: a compaction, also by another process, or an OPTIMIZE of somebody's, which leave the
        position where it is. A MERGE of Delta's is refused by these as by another writer.
        """
        before = app_version(self.table, self.app)
        for _ in range(_ATTEMPTS):
            with suppress(VersionTakenError, FencedError):
                how()
                return
            self.read(self.table.update_incremental)
            if app_version(self.table, self.app) != before:
                break
        raise FencedError(f"{self.table.table_uri}: another process has written this table", FENCED_HINT)

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
        before = read_position(self.table, self.app)
        return fenced(self.table, self.app, before, reading)

    def nothing(self) -> None:
        """The position moves, the data stay."""
        commit_nothing(self.table, self.app, self.position, self._properties)

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        ordered = rows.select([field.name for field in self.table.schema().fields])
        if is_partitioned(self.table):
            self._write_partitions(ordered, mode)
            return
        writer = self._writer(dict(zip(ordered.column_names, ordered.columns, strict=True)))
        write = partial(
            write_deltalake, mode=mode, commit_properties=self._properties, writer_properties=writer
        )
        fenced(self.table, self.app, self.position, lambda: write(self.table, ordered))

    def _write_partitions(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        """deltalake would make a folder of each partition's name, in which not all readers find the files."""
        schema = pa.schema(self.table.schema().to_arrow())
        with files_beside(self.table.table_uri, schema) as files:
            for batch in rows.cast(schema).to_batches():
                files.write(batch)
            written = files.finish()
        if mode == "append":
            commit_files(self.table, self.app, self.position, written, self._properties)
        else:
            replace_files(self.table, self.app, self.position, written, schema, self._properties)

    @property
    def rewrites_itself(self) -> bool:
        """Whether files in which rows change are written again by us, and not by deltalake's MERGE."""
        return is_partitioned(self.table) and can_commit(self.table)

    def marks(self, bytes_to_rewrite: int, bytes_of_change: int) -> bool:
        """Whether rows are to be marked as gone where they lie, instead of writing their files again."""
        if self.strategy == "rewrite" or not can_commit(self.table):
            return False
        if self.strategy == "merge_on_read":
            return True
        return bytes_to_rewrite > max(_CHEAP_BYTES, _WORTH_REWRITING * bytes_of_change)

    def replace(self, found: FileRows, gone: Places, rows: pa.Table) -> None:
        """Mark the rows at these places as gone, and add others, in all columns of the table.

        Raises VersionTakenError when somebody has committed since the places were found.
        """
        if len(gone) == 0 and len(rows) == 0:
            self.nothing()
            return
        with files_beside(found.uri, found.schema) as files:
            for batch in rows.select(found.schema.names).cast(found.schema).to_batches():
                files.write(batch)
            written = files.finish()
        replace_rows(self.table, self.app, self.position, found, gone, written, self._properties)

    def rewrite(
        self,
        found: FileRows,
        gone: Places,
        rows: pa.Table,
        others: Callable[[pa.Table], pa.Table] | None = None,
    ) -> None:
        """The same, but write the files anew that lose rows; or all, with what `others` makes of the rows
        that stay. Raises what `replace` does."""
        if len(gone) == 0 and len(rows) == 0 and others is None:
            self.nothing()
            return
        lost = dict(gone.by_file())
        numbers = list(lost) if others is None else list(range(len(found.files)))
        with files_beside(found.uri, found.schema) as files:
            for number in numbers:
                for part in found.all_of(number, lost.get(number, _NO_ROWS)):
                    for batch in (part if others is None else others(part)).to_batches():
                        files.write(batch)
            for batch in rows.select(found.schema.names).cast(found.schema).to_batches():
                files.write(batch)
            written = files.finish()
        rewrite_files(self.table, self.app, self.position, found, numbers, written, self._properties)

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
