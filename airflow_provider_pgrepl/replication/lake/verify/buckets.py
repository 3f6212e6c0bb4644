"""Ranges of rows by the hash of their keys, and the sums to which the rows of each side are reduced.

A range is a bucket: neither side needs an order or an index of its rows to find the rows of one. A bucket's
content is reduced to the number of its rows and the sum of their hashes, modulo 2^64 in each half. Sums of
parts of a table are added, so that each part is read by itself, in any order. Of ranges that differ, whole
rows are collected by their hashes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes

from . import kernels
from .row_hashes import Hashes, RowHashes, hashes_of

Ints = np.ndarray[Any, np.dtype[np.int64]]
ROWS_OF_BUCKET = 64
MOST_BUCKETS = 1 << 16
K1, K2, R1, R2 = "k1", "k2", "r1", "r2"
MOST_PICKED_BYTES = 256 << 20
"""The most bytes of rows that are collected, uncompressed: they are held in memory."""


@dataclass(frozen=True)
class RowShape:
    """The columns of a table that are compared, in the types of the lake, and those of its key.

    `keys`: empty for a table without a key, whose rows are counted by all of their values. `seed`: of the
    hashes.
    """

    columns: tuple[str, ...]
    keys: tuple[str, ...]
    seed: tuple[int, int]

    def hash_rows(self, rows: pa.Table | pa.RecordBatch) -> tuple[RowHashes, RowHashes]:
        """Return the hashes of keys and of whole rows."""
        whole = hashes_of((_array(rows, name) for name in self.columns), rows.num_rows, self.seed)
        if not self.keys:
            return whole, whole
        return hashes_of((_array(rows, name) for name in self.keys), rows.num_rows, self.seed), whole

    def hash_column(self, rows: pa.Table | pa.RecordBatch, name: str) -> Hashes:
        """Return a hash of each value of one column."""
        own = hashes_of([_array(rows, name)], rows.num_rows, self.seed)
        return own.h1 ^ own.h2


def _array(rows: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
    column = rows.column(name)
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


@dataclass(frozen=True)
class Buckets:
    """Buckets of rows. `slots`: for each remainder of the key's first half, the number of its range, or -1 if
    the range is left out. `sub_buckets`: buckets in each range, chosen by the second half."""

    slots: Ints
    sub_buckets: int = 1

    @classmethod
    def for_rows(cls, rows: int) -> Buckets:
        """Return buckets of some 64 rows each, at most 65,536 of them."""
        wanted = max(1, min(MOST_BUCKETS, rows // ROWS_OF_BUCKET))
        return cls(np.arange(1 << (wanted - 1).bit_length(), dtype=np.int64))

    @property
    def count(self) -> int:
        return (int(self.slots.max(initial=-1)) + 1) * self.sub_buckets

    def split(self, differing: Ints) -> Buckets:
        """Return the differing ranges of these buckets, each split into an equal number of buckets, up to
        MOST_BUCKETS in all. Only for buckets that are not split yet."""
        slots = np.full(len(self.slots), -1, np.int64)
        slots[differing] = np.arange(len(differing))
        return Buckets(slots, 1 << (max(1, MOST_BUCKETS // max(1, len(differing))).bit_length() - 1))

    def of(self, keys: RowHashes) -> Ints:
        """Return the bucket of each key, -1 for none."""
        slot = self.slots[(keys.h1 & np.uint64(len(self.slots) - 1)).astype(np.int64)]
        within = (keys.h2 & np.uint64(self.sub_buckets - 1)).astype(np.int64)
        return np.where(slot < 0, -1, slot * self.sub_buckets + within)


@dataclass
class BucketSums:
    """The number of rows and the sum of their hashes in each bucket. `is_kept`: an earlier comparison has
    computed them."""

    counts: Ints
    s1: Hashes
    s2: Hashes
    is_kept: bool = False

    @classmethod
    def zero(cls, buckets: int) -> BucketSums:
        return cls(np.zeros(buckets, np.int64), np.zeros(buckets, np.uint64), np.zeros(buckets, np.uint64))

    def add(self, other: BucketSums) -> None:
        self.counts += other.counts
        self.s1 += other.s1
        self.s2 += other.s2

    def subtract(self, other: BucketSums) -> None:
        self.counts -= other.counts
        self.s1 -= other.s1
        self.s2 -= other.s2

    def differing(self, other: BucketSums) -> Ints:
        """Return the numbers of the buckets in which the two differ."""
        equal = (self.counts == other.counts) & (self.s1 == other.s1) & (self.s2 == other.s2)
        return np.flatnonzero(~equal)

    @property
    def rows(self) -> int:
        return int(self.counts.sum())


@dataclass
class BucketReducer:
    """Reduces rows to the sums of buckets."""

    shape: RowShape
    buckets: Buckets
    result: BucketSums = field(init=False)

    def __post_init__(self) -> None:
        self.result = BucketSums.zero(self.buckets.count)

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        keys, whole = self.shape.hash_rows(rows)
        kernels.add_to_buckets(
            keys.h1,
            keys.h2,
            whole.h1,
            whole.h2,
            self.buckets.slots,
            self.buckets.sub_buckets,
            self.result.counts,
            self.result.s1,
            self.result.s2,
        )


@dataclass
class RowList:
    """Collects the hashes of the rows of some buckets, one by one: those of key, row and each column.

    `wanted`: True for each wanted bucket. `keys`: the first halves of the wanted keys' hashes, None for all.
    `shows_keys`: also collect the values of the key's columns. `has_columns`: collect the columns' hashes.
    """

    shape: RowShape
    buckets: Buckets
    wanted: np.ndarray[Any, np.dtype[np.bool_]]
    shows_keys: bool = False
    keys: Hashes | None = None
    has_columns: bool = True
    found: list[pa.Table] = field(default_factory=list)

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        keys, whole = self.shape.hash_rows(rows)
        bucket = self.buckets.of(keys)
        is_wanted = (bucket >= 0) & self.wanted[bucket]
        if self.keys is not None:
            is_wanted &= np.isin(keys.h1, self.keys)
        chosen = np.flatnonzero(is_wanted)
        if not len(chosen):
            return
        some = rows.take(pa.array(chosen))
        columns: dict[str, Any] = {K1: keys.h1, K2: keys.h2, R1: whole.h1, R2: whole.h2}
        columns = {name: pa.array(values[chosen]) for name, values in columns.items()}
        for number, name in enumerate(self.shape.columns if self.has_columns else ()):
            columns[column_hash(number)] = pa.array(self.shape.hash_column(some, name))
        if self.shows_keys:
            for number, name in enumerate(self.shape.keys):
                columns[key_value(number)] = _array(some, name)
        self.found.append(pa.table(columns))

    @property
    def result(self) -> pa.Table | None:
        return _joined(self.found)


def _joined(found: list[pa.Table]) -> pa.Table | None:
    return pa.concat_tables(found) if found else None


def column_hash(number: int) -> str:
    """Return the name, in a list of rows, of the hash of column `number`."""
    return f"c{number}"


def key_value(number: int) -> str:
    """Return the name, in a list of rows, of the value of key column `number`."""
    return f"v{number}"


@dataclass(frozen=True)
class Collection:
    """A job for the tasks of a side: collect the sums of buckets, or the rows of the `wanted` ones.

    Sent to each task. `keys`, `has_columns`: as of RowList.
    """

    shape: RowShape
    buckets: Buckets
    wanted: np.ndarray[Any, np.dtype[np.bool_]] | None = None
    shows_keys: bool = False
    keys: Hashes | None = None
    has_columns: bool = True

    def begin(self) -> BucketReducer | RowList:
        if self.wanted is None:
            return BucketReducer(self.shape, self.buckets)
        return RowList(self.shape, self.buckets, self.wanted, self.shows_keys, self.keys, self.has_columns)

    def merge(self, results: Iterable[Any]) -> Any:
        """Return the result of all rows, from those of parts of them."""
        if self.wanted is None:
            total = BucketSums.zero(self.buckets.count)
            for sums in results:
                total.add(sums)
            return total
        found = [rows for rows in results if rows is not None]
        return _joined(found)


@dataclass
class RowPick:
    """Collects whole rows by their hashes. `wanted`: the halves of the wanted hashes, a pair for each.

    Raises LakeTableError if the rows have more than MOST_PICKED_BYTES.
    """

    shape: RowShape
    wanted: Hashes
    found: list[pa.Table] = field(default_factory=list)
    size: int = 0

    def __post_init__(self) -> None:
        order = np.lexsort((self.wanted[:, 1], self.wanted[:, 0]))
        self._h1, self._h2 = self.wanted[order, 0], self.wanted[order, 1]
        # More than 1 by chance only.
        self._alike = int(np.unique(self._h1, return_counts=True)[1].max(initial=0))

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        _, whole = self.shape.hash_rows(rows)
        chosen = np.flatnonzero(self._is_wanted(whole))
        if not len(chosen):
            return
        some = rows.take(pa.array(chosen))
        columns = [pa.array(whole.h1[chosen]), pa.array(whole.h2[chosen])]
        names = [R1, R2]
        for number, name in enumerate(self.shape.columns):
            columns.append(some.column(name))
            names.append(column_hash(number))
        self.found.append(pa.table(columns, names))
        self.size += self.found[-1].nbytes
        _check_size(self.size)

    def _is_wanted(self, hashes: RowHashes) -> np.ndarray[Any, np.dtype[np.bool_]]:
        first, found = np.searchsorted(self._h1, hashes.h1), np.zeros(len(hashes), np.bool_)
        for step in range(self._alike):
            at = np.minimum(first + step, len(self._h1) - 1)
            found |= (self._h1[at] == hashes.h1) & (self._h2[at] == hashes.h2)
        return found

    @property
    def result(self) -> pa.Table | None:
        return _joined(self.found)


@dataclass(frozen=True)
class RowPicking:
    """A job for the tasks of a side: collect the rows with these hashes. Sent to each task."""

    shape: RowShape
    wanted: Hashes

    def begin(self) -> RowPick:
        return RowPick(self.shape, self.wanted)

    def merge(self, results: Iterable[pa.Table | None]) -> pa.Table | None:
        """Return the rows that the tasks collected, None if there are none. Raises LakeTableError if they
        have more than MOST_PICKED_BYTES."""
        found, size = [], 0
        for rows in results:
            if rows is not None:
                found.append(rows)
                size += rows.nbytes
                _check_size(size)
        return _joined(found)


def _check_size(size: int) -> None:
    if size > MOST_PICKED_BYTES:
        raise LakeTableError(f"the rows that differ have more than {show_bytes(MOST_PICKED_BYTES)}")


Job = Collection | RowPicking
"""A job for the tasks of a side."""
