"""The lake's side of a comparison: a table as of an LSN, reduced without reading it as a whole.

Spark tasks reduce the files of the nearest version. The changes between that version and the LSN touch few
rows: those are read as they are in the version, and as they are at the LSN. As sums are added and subtracted,
the table at the LSN is the version, less the former, plus the latter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeOutcome, outcome_of
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import (
    EMPTY,
    KIND,
    MARK,
    Overlay,
    ReplacedRows,
    origin,
    replaced,
)
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.lake.verify.buckets import BucketSums
from airflow_provider_pgrepl.replication.lake.verify.row_differences import without
from airflow_provider_pgrepl.replication.lake.verify.row_pick import Job
from airflow_provider_pgrepl.replication.spark.executors import on_executor, result_of
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.replication.values import DELETED

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_CHANGES = 2_000_000
"""The most changes of a table between its version and the LSN that are held in memory."""
_TASKS_AT_ONCE = 64
"""The tasks whose results the driver holds at the same time."""
_TASK_BYTES = 64 << 20
"""The bytes of small files that one task reads, together."""


@dataclass(frozen=True)
class FilesReading:
    """The reading of files of one version of a lake table, as it is sent to the tasks."""

    version: TableVersion
    collection: Job

    def read(self, number: int, files: Sequence[str]) -> RangeOutcome:
        return outcome_of(number, f"comparing {self.version.name}", lambda: self._collect(set(files)))

    def _collect(self, files: set[str]) -> Any:
        collector, rows = self.collection.begin(), FileRows(self.version.open())
        for number, file in enumerate(rows.files):
            if file.path in files:
                for batch in rows.all_of(number):
                    collector.add(live(batch))
        return collector.result


@dataclass(frozen=True)
class ChangedRows:
    """The rows that changed after the version: as they are in the version, and as they are at the LSN.

    `is_emptied`: no other row of the version is left at the LSN.
    """

    before: pa.Table | None = None
    after: pa.Table | None = None
    is_emptied: bool = False


@dataclass(frozen=True)
class LakeSide:
    """A lake table as of the LSN of a plan. Soft-deleted rows are left out."""

    spark: SparkSession
    plan: TablePlan

    def check_comparable(self) -> None:
        """Raise LakeError if the table was altered, or changed too much, between its version and the LSN."""
        changes = sum(overlay.count for overlay in self.plan.overlays)
        if any(overlay.evolves for overlay in self.plan.overlays) or len(self._counted) > 1:
            raise LakeError(
                f"{self.plan.table} was altered before {self.plan.lsn}, and the change is not applied yet",
                "verify it again when the replication app has applied the change",
            )
        if changes > MOST_CHANGES:
            raise LakeError(
                f"{self.plan.table} has {changes} changes before {self.plan.lsn} that are not applied yet",
                "verify it again when the table has caught up",
            )

    @cached_property
    def _rows(self) -> FileRows:
        return FileRows(self.plan.version.open())

    @property
    def row_count(self) -> int:
        """The number of rows of the version, with those that are marked as deleted."""
        return sum(self._rows.count(number) for number in range(len(self._rows.files)))

    def collect(self, collection: Job) -> Any:
        """Return what the collection finds in the table at the LSN.

        Raises LakeError, LakeTableError, ValueRangeError, SparkError.
        """
        found = collection.merge([] if self._changed.is_emptied else self._results(collection))
        changed = self._changed
        before = None if changed.is_emptied else _collected(collection, changed.before)
        after = _collected(collection, changed.after)
        if isinstance(found, BucketSums):
            if before is not None:
                found.subtract(before)
            return collection.merge([found] if after is None else [found, after])
        return collection.merge([without(found, before), after])

    def _results(self, collection: Job) -> Iterator[Any]:
        read, context = on_executor(FilesReading(self.plan.version, collection).read), self.spark.sparkContext
        shares = list(enumerate(self._shares()))
        for first in range(0, len(shares), _TASKS_AT_ONCE):
            some = shares[first : first + _TASKS_AT_ONCE]
            with spark_errors(f"comparing {self.plan.table}"):
                answers = context.parallelize(some, len(some)).map(lambda share: read(*share)).collect()
            for outcome in map(result_of, answers):
                if outcome.error is not None:
                    raise outcome.error
                yield outcome.result

    def _shares(self) -> Iterator[list[str]]:
        share: list[str] = []
        size = 0
        for file in self._rows.files:
            share.append(file.path)
            size += file.size
            if size >= _TASK_BYTES:
                yield share
                share, size = [], 0
        if share:
            yield share

    @property
    def _counted(self) -> list[Overlay]:
        return [overlay for overlay in self.plan.overlays if overlay.count]

    @cached_property
    def _changed(self) -> ChangedRows:
        if not self._counted:
            return ChangedRows()
        (overlay,) = self._counted
        if not overlay.key_names:
            net = overlay.net_rows()
            lost = net.lost.take(pa.array(np.repeat(np.arange(len(net.lost)), net.times)))
            return ChangedRows(lost if len(lost) else None, net.gained, net.overwrite)
        entries = overlay.entries()
        special = pc.is_in(entries[KIND], pa.array([EMPTY, MARK], entries[KIND].type))
        before = self._in_version(overlay, entries)
        after = live(ReplacedRows(entries, overlay.key_names).lay_over(before))
        return ChangedRows(live(before), after, bool(pc.any(special).as_py()))

    def _in_version(self, overlay: Overlay, entries: pa.Table) -> pa.Table:
        """Return the version's rows that the entries replace, or take values from."""
        names, parts = overlay.key_names, []
        for column in (replaced, origin):
            keys = pa.table([entries[column(number)] for number in range(len(names))], names=names)
            parts.append(keys.filter(keys.column(0).is_valid()))
        wanted = pa.concat_tables(parts).group_by(names).aggregate([]).select(names)
        schema = overlay.schema
        return self._rows.rows(self._rows.find(wanted), schema.names).cast(schema)


def live(rows: pa.Table) -> pa.Table:
    """Return the rows that are not soft-deleted."""
    return rows.filter(pc.invert(rows[DELETED])) if DELETED in rows.column_names else rows


def _collected(collection: Job, rows: pa.Table | None) -> Any:
    if rows is None:
        return None
    collector = collection.begin()
    for batch in rows.to_batches(max_chunksize=1 << 16):
        collector.add(batch)
    return collector.result
