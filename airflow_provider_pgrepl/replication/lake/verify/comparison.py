"""The comparison of one table: by buckets, then by finer buckets, then row by row.

One side is the source's table at a snapshot, the other the lake's as of an LSN. Spark tasks read ranges of
the one and files of the other and reduce them, so that neither is read as a whole. Of the lake, that is the
nearest version. The changes between that version and the LSN touch few rows: those are read as they are in
the version, and as they are at the LSN. As sums are added and subtracted, the table at the LSN is the
version, less the former, plus the latter.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeError, SourceError, TableError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import TableCopy
from airflow_provider_pgrepl.replication.lake.snapshot.csv import CsvTypeError, read_csv
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import RangeOutcome, RangeTasks, outcome_of
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
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import (
    CopyRange,
    Sample,
    is_unchanged,
    open_copy,
)
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableSnapshotHolder
from airflow_provider_pgrepl.replication.spark.executors import on_executor, result_of
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.replication.values import DELETED, typed_columns

from .buckets import K1, Buckets, BucketSums, Collection, Job, RowShape
from .kept_sums import KeptSums
from .row_differences import RowDifferences, find_differences, unmatched_rows, without

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MOST_CHANGES = 2_000_000
"""The most changes of a table between its version and the LSN that are held in memory."""
_TASKS_AT_ONCE = 64
"""The tasks whose results the driver holds at the same time."""
_TASK_BYTES = 64 << 20
"""The bytes of small files that one task reads, together."""
_RANGES_AT_ONCE = 32
"""The ranges whose results the driver holds at the same time."""
SAMPLED_ROWS = 500_000
"""About the most rows of a sample: their hashes are held in memory."""
LISTED_ROWS = 200_000
"""The most rows of each side whose hashes are compared one by one, in memory."""
_ONE_BUCKET = Buckets(np.zeros(1, np.int64))
Ints = np.ndarray[Any, np.dtype[np.int64]]


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


@dataclass(frozen=True)
class SourceReading:
    """The reading of one table's ranges, as it is sent to the tasks."""

    dsn: str
    snapshot: str
    relation: Relation
    options: TableOptions
    collection: Job
    kept: KeptSums | None = None

    def copy(self, number: int, copy_range: CopyRange) -> RangeOutcome:
        def work() -> Any:
            return self._collect(copy_range) if self.kept is None else self._sums(copy_range, self.kept)

        return outcome_of(number, f"comparing {self.relation.table}", work)

    def under(self, snapshot: str) -> SourceReading:
        return replace(self, snapshot=snapshot)

    def _sums(self, copy_range: CopyRange, kept: KeptSums) -> BucketSums:
        # If the check fails or takes too long, the range is read, which reports an error that lasts.
        with suppress(SourceError):
            if copy_range.copied is not None and is_unchanged(self.dsn, self.snapshot, copy_range):
                found = kept.read(copy_range.copied)
                if found is not None:
                    return found
        sums: BucketSums = self._collect(copy_range)
        kept.add(copy_range, sums)
        return sums

    def _collect(self, copy_range: CopyRange) -> Any:
        with suppress(CsvTypeError):
            return self._attempt(copy_range, as_text=False)
        return self._attempt(copy_range, as_text=True)

    def _attempt(self, copy_range: CopyRange, *, as_text: bool) -> Any:
        collector = self.collection.begin()
        with open_copy(self.dsn, self.snapshot, copy_range) as stream:
            batches = read_csv(stream, self.relation, self.options, as_text=as_text)
            with closing(batches):  # type: ignore[type-var]
                for batch in batches:
                    collector.add(batch)
        return collector.result


@dataclass(frozen=True)
class SourceSide:
    """A table of the source at the snapshot of its keeper.

    `relation`: without the columns that are not copied. `sessions`: how many ranges are read at once.
    `reading`: the class by which tasks read a range. `finished`: called with number and result of each range
    that was read, in another thread. It must not raise. `kept`: where the sums of finished ranges are kept.
    """

    spark: SparkSession
    dsn: str
    keeper: TableSnapshotHolder
    relation: Relation
    options: TableOptions
    ranges: Sequence[CopyRange]
    sessions: int
    reading: type[SourceReading] = SourceReading
    finished: Callable[[int, Any], None] = lambda _number, _result: None
    kept: KeptSums | None = None

    def sums(self, whole: Collection) -> BucketSums:
        """Return the sums of all buckets. Those of ranges that are kept are not read, and finished ones are
        kept. Raises as `RangeCopies.run`."""
        sums: BucketSums = whole.merge(self._results(whole, self.kept))
        return sums

    def collect(self, collection: Job) -> Any:
        """Return what the collection finds in the table. Raises as `RangeCopies.run`."""
        return collection.merge(self._results(collection))

    def _results(self, collection: Job, kept: KeptSums | None = None) -> Iterator[Any]:
        reading = self.reading(self.dsn, self.keeper.snapshot, self.relation, self.options, collection, kept)
        for first in range(0, len(self.ranges), _RANGES_AT_ONCE):
            finished = partial(self._finished, first)
            under = reading.under(self.keeper.snapshot)
            tasks = RangeTasks(self.spark, under, self.keeper, self.sessions, finished)
            yield from tasks.results(self.ranges[first : first + _RANGES_AT_ONCE])

    def _finished(self, first: int, number: int, result: Any) -> None:
        self.finished(first + number, result)


def counting(copy: TableCopy) -> Callable[[int, Any], None]:
    """Return a `finished` that counts the ranges as a report's progress, when all of their rows are read.

    Later readings look for the rows that differ, and are not counted.
    """

    def finished(number: int, result: Any) -> None:
        if isinstance(result, BucketSums):
            copy.count(number, result.rows, is_kept=result.is_kept)

    return finished


@dataclass(frozen=True)
class NotCompared:
    """A part of a table, or all of it, that cannot be compared, and why."""

    part: str
    reason: str


@dataclass(frozen=True)
class Listed:
    """The hashes of all rows that differ, and the sums of the source by which a repair is verified.

    `missing`: rows that only the source has, `extra`: rows that only the lake has, each as often as it
    differs. A changed row is in both.
    """

    whole: Collection
    at_source: BucketSums
    missing: pa.Table | None
    extra: pa.Table | None


@dataclass
class TableComparison:
    """The result for one table.

    `ranges`: the buckets into which its rows were reduced. `differing_ranges`: those that differ, and
    `listed_ranges` of them those whose rows were compared one by one: `differences` counts no others.
    Of a sample, only `sampled_rows` of the source were compared, and the rows of the lake were not counted.
    `listed`: the hashes of the differing rows, if all differing ranges were compared one by one.
    """

    status: Literal["equal", "sample_equal", "different"]
    source_rows: int
    lake_rows: int
    ranges: int
    differing_ranges: int = 0
    listed_ranges: int = 0
    differences: RowDifferences = field(default_factory=RowDifferences)
    sampled_rows: int | None = None
    listed: Listed | None = field(default=None, repr=False)


def shape_of(relation: Relation, options: TableOptions) -> RowShape:
    """Return the columns of a table that are compared, and its key, with a new seed."""
    columns = tuple(typed.name for typed in typed_columns(relation, options) if typed.index is not None)
    keys = tuple(column.name for column in relation.key_columns)
    return RowShape(columns, keys, (secrets.randbits(64), secrets.randbits(64)))


def sample_of(percent: float, rows: int) -> Sample:
    """Return a random sample of a table with about `rows` rows. It has at most about SAMPLED_ROWS rows."""
    return Sample(min(percent, 100 * SAMPLED_ROWS / max(1, rows)), secrets.randbits(31))


def uncompared_parts(
    relation: Relation, options: TableOptions, sample: Sample | None = None
) -> list[NotCompared]:
    """Return the parts of a table that a comparison leaves out."""
    found = []
    if sample is not None:
        reason = f"{sample.percent:g} % of the source's pages were read"
        found.append(NotCompared("rows outside of the sample", reason))
        found.append(NotCompared("rows that only the lake has", "a sample does not show them"))
    for column in sorted((*relation.columns, *relation.unpublished, *relation.dropped), key=_attnum):
        part = f"column {column.name}"
        if options.column(column.name).excluded:
            found.append(NotCompared(part, "exclude_columns leaves it out of the lake"))
        elif column.attnum in relation.ignored:
            found.append(NotCompared(part, "on_drift ignore leaves it out of the lake"))
        elif column in relation.unpublished:
            found.append(NotCompared(part, "the publication does not carry its values"))
        elif column in relation.dropped:
            found.append(NotCompared(part, "the source has dropped it"))
    policy = options.policy
    if policy.deletes == "soft":
        found.append(NotCompared("soft-deleted rows", "the source no longer has them"))
    if policy.truncate == "ignore" and sample is None:
        found.append(NotCompared("rows that only the lake has", "truncate ignore keeps truncated rows"))
    if policy.history:
        found.append(NotCompared("history", "the source has no earlier versions of rows"))
    return found


def _attnum(column: Any) -> int:
    return int(column.attnum)


@dataclass(frozen=True)
class TableComparer:
    """Compares a table of the source with the lake table.

    `open_lake`: returns the lake's side when it has reached the snapshot. It is called after the source was
    read, so that the lake has time to get there. `most_or_none`: list all rows that differ, without the
    columns in which they differ, or none if their buckets have more than this number of rows. None: list as
    many as LISTED_ROWS.
    """

    source: SourceSide
    open_lake: Callable[[], LakeSide]
    shape: RowShape
    buckets: Buckets
    shows_keys: bool = False
    most_or_none: int | None = None

    @property
    def _ignores_extra(self) -> bool:
        return self.source.options.policy.truncate == "ignore"

    def compare(self) -> TableComparison:
        """Compare the table. Raises what reading either side raises."""
        buckets = self.buckets
        whole = Collection(self.shape, buckets)
        at_source = self.source.sums(whole)
        lake = self.open_lake()
        in_lake = lake.collect(whole)
        differing, sums = at_source.differing(in_lake), at_source
        found = TableComparison("equal", at_source.rows, in_lake.rows, buckets.count, len(differing))
        if not len(differing):
            return found
        most = LISTED_ROWS if self.most_or_none is None else self.most_or_none
        if _rows_of(at_source, in_lake)[differing].sum() > most:
            buckets = buckets.split(differing)
            if self.most_or_none is not None and (buckets.sub_buckets == 1 or len(differing) > most):
                found.status = "different"
                return found
            finer = Collection(self.shape, buckets)
            at_source, in_lake = self.source.collect(finer), lake.collect(finer)
            differing = at_source.differing(in_lake)
            found.differing_ranges = len(differing)
        listed = _fitting(differing, _rows_of(at_source, in_lake), most)
        is_complete = len(listed) == len(differing)
        if self.most_or_none is not None and not is_complete:
            listed = listed[:0]
        found.listed_ranges = len(listed)
        if len(listed):
            rows = self._list(lake, buckets, listed)
            found.differences = self._differences(*rows, ignores_extra=self._ignores_extra)
            if is_complete:
                found.listed = Listed(whole, sums, *unmatched_rows(*rows))
        if found.differences.rows or not (self._ignores_extra and is_complete):
            found.status = "different"
        return found

    def compare_sample(self) -> TableComparison:
        """Compare the rows that the source's side has, which is a sample of the table, with those of the lake
        that have their keys. Raises what reading either side raises."""
        every = Collection(self.shape, _ONE_BUCKET, np.ones(1, np.bool_), self.shows_keys)
        at_source = self.source.collect(every)
        lake = self.open_lake()
        if at_source is None:
            raise TableError(f"{self.source.relation.table}: the sample has no rows")
        some = replace(every, keys=np.unique(at_source[K1].to_numpy()))
        found = self._differences(at_source, lake.collect(some), ignores_extra=True)
        status: Literal["sample_equal", "different"] = "different" if found.rows else "sample_equal"
        return TableComparison(status, len(at_source), 0, 0, differences=found, sampled_rows=len(at_source))

    def _list(
        self, lake: LakeSide, buckets: Buckets, listed: Ints
    ) -> tuple[pa.Table | None, pa.Table | None]:
        wanted = np.zeros(buckets.count, np.bool_)
        wanted[listed] = True
        has_columns = self.most_or_none is None
        rows = Collection(self.shape, buckets, wanted, self.shows_keys, has_columns=has_columns)
        return self.source.collect(rows), lake.collect(rows)

    def _differences(
        self, at_source: pa.Table | None, in_lake: pa.Table | None, *, ignores_extra: bool
    ) -> RowDifferences:
        types = [column.pg_type for column in self.source.relation.key_columns] if self.shows_keys else []
        return find_differences(at_source, in_lake, self.shape, types, ignores_extra=ignores_extra)


def _rows_of(one: BucketSums, other: BucketSums) -> Ints:
    return np.maximum(one.counts, other.counts)


def _fitting(differing: Ints, rows: Ints, most: int) -> Ints:
    """Return the differing buckets, the smallest first, that have at most `most` rows together."""
    order = differing[np.argsort(rows[differing], kind="stable")]
    return order[np.cumsum(rows[order]) <= most]
