"""What a MERGE by key does, by ourselves: rows are marked where they lie, or their files written again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.places import Places
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import MISSING, SliceCommit, Way
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints, replaced, take
from airflow_provider_pgrepl.replication.values import Partitioning


@dataclass(frozen=True)
class Kinds:
    """What the kinds of a source's rows ask for, each a set of kinds.

    `there`: the lake must hold a row under the key; `goes`: the lake's row goes; `comes`: a row comes where
    the lake has none. The lake's row changes where it is and does not go.
    """

    there: Sequence[int]
    goes: Sequence[int]
    comes: Sequence[int]


@dataclass(frozen=True)
class MergeOnRead:
    """The rows of `source`, as they are given to a MERGE, into the table of a commit.

    `keys`: by name of the lake's key column the source's column with the key under which the row is looked
    for, null: it is a new row. The values for the columns `names` are in c0, c1 …; where u0, u1 … is true the
    lake's stays. `kind` says what is to happen. `gone_mark`: the column that says of a row in the lake that
    it has gone already; a row that must be there must not have. `partitions`: how the table is partitioned.
    """

    commit: SliceCommit
    source: pa.Table
    keys: Mapping[str, str]
    names: Sequence[str]
    kinds: Kinds
    gone_mark: str | None = None
    partitions: Partitioning | None = None

    def make(self, way: Way) -> None:
        """Raises LakeTableError when a row that must be there is missing, or a key is there twice."""
        self.commit.replace(self._rows, *self._changes(), way)

    def rewrite(self, others: Callable[[pa.Table], pa.Table]) -> None:
        """Without marks; `others`: what becomes of all rows that the source does not name. Raises what `make`
        does."""
        self.commit.rewrite(self._rows, *self._changes(), others)

    def _changes(self) -> tuple[Places, pa.Table]:
        """Where rows go, and the rows that come."""
        self._check()
        place, kind = self._place, self._kind
        changes = (place >= 0) & ~np.isin(kind, self.kinds.goes)
        comes = changes | ((place < 0) & np.isin(kind, self.kinds.comes))
        return self._places, self._values(np.flatnonzero(comes))

    @property
    def bytes_to_rewrite(self) -> int:
        """The size of all files that may hold one of the keys."""
        return self._rows.bytes_that_may_hold(self._wanted, self._may_be_in)

    @cached_property
    def _rows(self) -> FileRows:
        return FileRows(self.commit.table)

    @cached_property
    def _kind(self) -> Ints:
        kind: Ints = self.source["kind"].to_numpy()
        return kind

    @cached_property
    def _keyed(self) -> Ints:
        """The rows that have a key to look for."""
        first = self.source[next(iter(self.keys.values()))]
        return np.flatnonzero(first.is_valid().to_numpy())

    @cached_property
    def _wanted(self) -> pa.Table:
        keyed = pa.array(self._keyed)
        return pa.table({name: self.source[column].take(keyed) for name, column in self.keys.items()})

    @cached_property
    def _may_be_in(self) -> set[str | None] | None:
        return None if self.partitions is None else self.partitions.of_rows(self._wanted)

    @cached_property
    def _places(self) -> Places:
        """Where the lake's rows under the keys are."""
        return self.commit.read(lambda: self._rows.find(self._wanted, self._may_be_in))

    @cached_property
    def _place(self) -> Ints:
        """By row of the source the number of its place, -1: the lake has no row under the key."""
        place = np.full(len(self.source), -1, np.int64)
        place[self._keyed[self._places.which]] = np.arange(len(self._places))
        return place

    def _check(self) -> None:
        if int((self._place >= 0).sum()) != len(self._places):
            raise LakeTableError(f"{self.commit.table.table_uri}: the lake table holds a key twice")
        must = np.isin(self._kind, self.kinds.there)
        is_missing = bool((self._place[must] < 0).any())
        if self.gone_mark is not None and not is_missing:
            known = self._places.where(np.sort(self._place[must]))
            is_missing = bool(np.asarray(self._rows.rows(known, [self.gone_mark])[0]).any())
        if is_missing:
            raise LakeTableError(f"{self.commit.table.table_uri}: {MISSING}")

    def _values(self, chosen: Ints) -> pa.Table:
        """The rows that are to be there, of all those of the source that are chosen."""
        columns = {}
        for index, name in enumerate(self.names):
            values = take(_array(self.source[f"c{index}"]), chosen)
            if f"u{index}" in self.source.schema.names:
                keep: Bools = self.source[f"u{index}"].to_numpy()[chosen] & (self._place[chosen] >= 0)
                values = self._kept(name, values, chosen, keep)
            columns[name] = values
        return pa.table(columns)

    def _kept(self, name: str, values: pa.Array, chosen: Ints, keep: Bools) -> pa.Array:
        place = self._place[chosen[keep]]
        order = np.argsort(place)
        found = _array(self._rows.rows(self._places.where(place[order]), [name])[0])
        return replaced(values, keep, take(found, np.argsort(order)))


def _array(column: pa.ChunkedArray) -> pa.Array:
    return column.combine_chunks()
