"""One commit of a slice of changes to its lake table, with the slice's position, and the ways to make it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, WriterProperties, write_deltalake
from deltalake.table import TableMerger
from pyroaring import BitMap64

from airflow_provider_pgrepl.errors import LakeTableError, OvertakenError
from airflow_provider_pgrepl.replication.delta.log import can_commit, committing
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    Result,
    VersionTakenError,
    bounded_columns,
    commit_files,
    commit_nothing,
    commit_properties,
    fenced,
    narrow_bounds,
    overtaken,
    replace_files,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import (
    LakeFiles,
    files_beside,
    is_partitioned,
)
from airflow_provider_pgrepl.replication.lake.delta.statistics import has_safe_bounds, writer_properties
from airflow_provider_pgrepl.replication.lake.delta.table import read_position, relation_marks
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import replace_rows, rewrite_files
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows, RowLocations
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.tables import Merge

MISSING = (
    "the lake table lacks a row that the source updated or deleted: another program changed the table, or the"
    " table lost commits"
)
_DIVISION = "Divide by zero"

_ATTEMPTS = 10
_CHEAP_BYTES = 256 << 10
_WORTH_REWRITING = 4
"""Factor by which a rewrite may exceed the bytes of the change. A rewrite leaves nothing to compact later."""
_DEAR_BYTES = 8 << 20
"""Bytes that a rewrite may reach for a large change: while it takes seconds, the next change grows."""


Way = Literal["mark", "rewrite", "merge"]


def write_rows(files: LakeFiles, rows: pa.Table) -> None:
    """Write rows to files. The rows must have the columns and types of the files."""
    for batch in rows.to_batches():
        files.write(batch)


def write_left(
    files: LakeFiles,
    found: FileRows,
    gone: Mapping[int, BitMap64],
    make: Callable[[pa.Table], pa.Table] = lambda rows: rows,
) -> None:
    """Write the remaining rows of data files to new files, each batch after `make` has changed it.

    `gone`: by number of the data file, the rows to leave out.
    """
    found.fetch(gone)
    for number, marks in gone.items():
        for left in found.all_of(number, without=np.asarray(marks.to_array(), np.int64)):
            write_rows(files, make(left))


@dataclass(frozen=True)
class SliceCommit:
    """The commit that sets `table` to `position`, made through this handle. Only one method may commit.

    `relation_version`: the version of the relation in force at the position. `kind`: of the commit, in its
    metadata. `marks`: the other app IDs that it sets, None for those of `relation_marks`.

    All methods raise FencedError if another process of this pipeline has written the table, LakeTableError,
    LakeUnavailableError.
    """

    table: DeltaTable
    app: str
    position: LSN
    commit_ts: datetime | None
    relation_version: int
    strategy: Merge = "auto"
    kind: str = "changes"
    marks: Mapping[str, int] | None = None

    def make(self, how: Callable[[], None]) -> None:
        """Call `how`, which reads the table and commits, up to 10 times until no other commit comes first.

        That can be a compaction, also by another process, or an OPTIMIZE by another program: these leave the
        position unchanged. They make a MERGE of deltalake fail as any other writer does. If the position has
        changed, raises FencedError. If every attempt failed, raises OvertakenError.
        """
        before = app_version(self.table, self.app)
        for _ in range(_ATTEMPTS):
            version, failed = int(self.table.version()), None
            try:
                how()
                return
            except (VersionTakenError, OvertakenError):
                pass
            except LakeTableError as error:
                # The files that it read may have been compacted and deleted in the meantime.
                failed = error
            self.read(self.table.update_incremental)
            is_ours_still = app_version(self.table, self.app) == before
            if failed is not None and not (is_ours_still and int(self.table.version()) > version):
                raise failed
            if not is_ours_still:
                break
        raise overtaken(self.table, self.app, version)

    @property
    def _properties(self) -> CommitProperties:
        marks = self.marks
        if marks is None:
            marks = relation_marks(self.table, self.relation_version)
        return commit_properties(self.app, self.position, self.kind, self.commit_ts, marks)

    def _writer(self, values: Mapping[str, pa.ChunkedArray]) -> WriterProperties:
        """Return the writer properties for a commit that adds these values to the columns.

        Columns whose new values have no safe bounds are removed from the table's declared bounds first.
        """
        bounded = bounded_columns(self.table, self.app)
        safe = [name for name in bounded if name not in values or has_safe_bounds(values[name])]
        return writer_properties(narrow_bounds(self.table, self.app, safe), compression="SNAPPY")

    def read(self, reading: Callable[[], Result]) -> Result:
        """Call `reading`, which reads the table, and check that the table's position stays the same."""
        before = read_position(self.table, self.app)
        return fenced(self.table, self.app, before, reading)

    def nothing(self) -> None:
        """Commit the position without changing data."""
        commit_nothing(self.table, self.app, self.position, self._properties)

    def write(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        ordered = rows.select([field.name for field in self.table.schema().fields])
        # Larger columns may not fit into the types of own files.
        is_small = rows.nbytes < 2**31
        if is_partitioned(self.table) or (self.is_ours and is_small):
            self._write_files(ordered, mode)
            return
        writer = self._writer(dict(zip(ordered.column_names, ordered.columns, strict=True)))
        properties = self._properties

        def commit() -> None:
            with committing(self.table, properties):
                write_deltalake(
                    self.table, ordered, mode=mode, commit_properties=properties, writer_properties=writer
                )

        fenced(self.table, self.app, self.position, commit)

    def _write_files(self, rows: pa.Table, mode: Literal["append", "overwrite"]) -> None:
        """Write rows to files of this package, and commit them.

        Their names show that they are this package's, when the log no longer reaches back to their commit.
        Of a partitioned table, deltalake would write a folder for each partition, in which some readers do
        not find the files.
        """
        schema = pa.schema(self.table.schema().to_arrow())
        with files_beside(self.table.table_uri, schema) as files:
            write_rows(files, rows.cast(schema))
            written = files.finish()
        if mode == "append":
            commit_files(self.table, self.app, self.position, written, self._properties)
        else:
            replace_files(self.table, self.app, self.position, written, schema, self._properties)

    @property
    def is_ours(self) -> bool:
        """True if this package supports all that the table requires of writers, so no MERGE is needed."""
        return can_commit(self.table)

    def way(self, bytes_to_rewrite: int, bytes_of_change: int) -> Way:
        """Return the way to delete rows.

        "mark" uses deletion vectors, "rewrite" rewrites their files, and "merge" runs deltalake's MERGE, for
        tables that require more of writers than this package supports. The strategy `auto` chooses "rewrite"
        if that rewrites few bytes, also in proportion to the change, and else "mark".
        """
        if not self.is_ours:
            return "merge"
        if self.strategy == "auto":
            cheap = min(_WORTH_REWRITING * bytes_of_change, _DEAR_BYTES)
            dear = bytes_to_rewrite > max(_CHEAP_BYTES, cheap)
            return "mark" if dear else "rewrite"
        return "mark" if self.strategy == "merge_on_read" else "rewrite"

    def replace(self, found: FileRows, gone: RowLocations, rows: pa.Table, way: Way) -> None:
        """Delete the rows at the locations `gone`, and add `rows`, which have all columns of the table.

        Raises VersionTakenError if another process has committed since the locations were found.
        """
        if len(gone) == 0 and len(rows) == 0:
            self.nothing()
        else:
            self.replace_at(found, gone, rows, way)

    def replace_at(self, found: FileRows, gone: RowLocations, rows: pa.Table, way: Way) -> None:
        """Do the same. Without rows, also raise VersionTakenError if another process has committed."""
        with files_beside(found.uri, found.schema) as files:
            marks = gone.marks()
            if way == "rewrite":
                # Keep the order in which rows were added: it shows which of equal rows without a key is
                # newer.
                write_left(files, found, marks)
            write_rows(files, rows.select(found.schema.names).cast(found.schema))
            self._replace(found, marks, files, way)

    def _replace(self, found: FileRows, gone: Mapping[int, BitMap64], files: LakeFiles, way: Way) -> None:
        at, replaces = (self.table, self.app, self.position, found), files.finish()
        if way == "mark":
            replace_rows(*at, gone, replaces, self._properties)
        else:
            rewrite_files(*at, gone, replaces, self._properties)

    def rewrite(
        self, found: FileRows, gone: RowLocations, rows: pa.Table, others: Callable[[pa.Table], pa.Table]
    ) -> None:
        """Delete and add rows as `replace` does, and rewrite all files. `others` converts the other rows."""
        numbers, lost = range(len(found.files)), gone.marks()
        with files_beside(found.uri, found.schema) as files:
            write_left(files, found, {number: lost.get(number, BitMap64()) for number in numbers}, others)
            write_rows(files, rows.select(found.schema.names).cast(found.schema))
            written = files.finish()
        rewrite_files(self.table, self.app, self.position, found, numbers, written, self._properties)

    def merge(self, source: pa.Table, conditions: Iterable[str], names: Sequence[str]) -> TableMerger:
        """Return a MERGE of `source` (alias s) into the table (alias t), which `run` commits.

        The source's columns c0, c1 and so on have the values for the columns `names`.
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
        """Commit a MERGE and return its metrics.

        A MERGE that divides by zero reports a missing row: raises LakeTableError then.
        """

        def execute() -> dict[str, Any]:
            before = self.table.version()
            metrics: dict[str, Any] = merger.execute()
            if self.table.version() == before:
                # deltalake makes no commit for a MERGE that changes nothing.
                self.nothing()
            return metrics

        return fenced(self.table, self.app, self.position, execute, known={_DIVISION: MISSING})
