"""The comparison of one table: by buckets, then by finer buckets, then row by row."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.lake.verify.buckets import (
    K1,
    Buckets,
    BucketSums,
    Collection,
    RowShape,
)
from airflow_provider_pgrepl.replication.lake.verify.lake_side import LakeSide
from airflow_provider_pgrepl.replication.lake.verify.row_differences import (
    RowDifferences,
    find_differences,
    unmatched_rows,
)
from airflow_provider_pgrepl.replication.lake.verify.source_side import SourceSide
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy.copy_stream import Sample
from airflow_provider_pgrepl.replication.values import typed_columns

SAMPLED_ROWS = 500_000
"""About the most rows of a sample: their hashes are held in memory."""
LISTED_ROWS = 200_000
"""The most rows of each side whose hashes are compared one by one, in memory."""
_ONE_BUCKET = Buckets(np.zeros(1, np.int64))
Ints = np.ndarray[Any, np.dtype[np.int64]]


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
    rows: int
    shows_keys: bool = False
    most_or_none: int | None = None

    @property
    def _ignores_extra(self) -> bool:
        return self.source.options.policy.truncate == "ignore"

    def compare(self) -> TableComparison:
        """Compare the table. Raises what reading either side raises."""
        buckets = Buckets.for_rows(self.rows)
        whole = Collection(self.shape, buckets)
        at_source = self.source.collect(whole)
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
