"""Merging of the final states of keyed rows into a lake table that holds exactly the source's rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows, RowLocations
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values import (
    Partitioning,
    lake_schema,
    partitioning,
    typed_column,
    typed_columns,
)

from .changes import Bools, Ints, array_of, replaced, take
from .collapse import NetChanges
from .slice_commit import MISSING, SliceCommit, Way

_INSERT, _UPDATE, _DELETE = range(3)


@dataclass(frozen=True)
class RowKindEffects:
    """The effects of the kinds of source rows. Each field is the set of kinds that have the effect.

    `there`: the lake must have a row with the key. `goes`: the lake's row is deleted. `comes`: a row is added
    if the lake has none. If the lake has a row that is not deleted, it is updated.
    """

    there: Sequence[int]
    goes: Sequence[int]
    comes: Sequence[int]


@dataclass(frozen=True)
class MergeOnRead:
    """A merge of `source`, with the same columns as for a MERGE, into the table of a commit.

    `keys`: by name of the lake's key column, the source column with the key to look for; null: the row is
    new. The source columns c0, c1 … have the values for the columns `names`. Where u0, u1 … is true, the
    lake's value is kept. The source column `kind` has the kind of each row.

    `gone_mark`: the column that marks soft-deleted rows in the lake; a row that must be there must not be
    marked. `partitions`: the partitioning of the table.
    """

    commit: SliceCommit
    source: pa.Table
    keys: Mapping[str, str]
    names: Sequence[str]
    kinds: RowKindEffects
    gone_mark: str | None = None
    partitions: Partitioning | None = None

    def make(self, way: Way) -> None:
        """Commit the merge. Raises LakeTableError if a required row is missing, or a key is there twice."""
        self.commit.replace(self._rows, *self._changes(), way)

    def rewrite(self, others: Callable[[pa.Table], pa.Table]) -> None:
        """Commit the merge and rewrite all files. `others` converts the rows that the source does not name.

        Raises what `make` does.
        """
        self.commit.rewrite(self._rows, *self._changes(), others)

    def _changes(self) -> tuple[RowLocations, pa.Table]:
        """Return the locations of the lake's rows with the keys, which are removed, and the rows to add."""
        self._check()
        place, kind = self._place, self._kind
        changes = (place >= 0) & ~np.isin(kind, self.kinds.goes)
        comes = changes | ((place < 0) & np.isin(kind, self.kinds.comes))
        return self._places, self._values(np.flatnonzero(comes))

    @property
    def bytes_to_rewrite(self) -> int:
        """The bytes of all files that may have one of the keys."""
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
        """The source rows that have a key to look for."""
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
    def _places(self) -> RowLocations:
        """The locations of the lake's rows with these keys."""
        return self.commit.read(lambda: self._rows.find(self._wanted, self._may_be_in))

    @cached_property
    def _place(self) -> Ints:
        """For each source row, the index of its location in `_places`; -1 if the lake has no such row."""
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
        """Return the final rows for the source rows `chosen`, with the lake's values where they are kept."""
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


_KINDS = RowKindEffects(there=(_UPDATE, _DELETE), goes=(_DELETE,), comes=(_INSERT,))


@dataclass(frozen=True)
class RowsCommit:
    """The collapsed changes of whole transactions, which become one commit."""

    collapsed: NetChanges
    changes: pa.Table
    relation: Relation
    options: TableOptions

    def make(self, commit: SliceCommit) -> None:
        """Commit the changes. Raises LakeTableError if a required row is missing, or a key is there twice."""
        if self.collapsed.overwrite:
            commit.write(self._final_rows(), "overwrite")
        elif len(self.collapsed) == 0:
            commit.nothing()
        elif self.collapsed.only_inserts:
            commit.write(self._final_rows(), "append")
        else:
            self._merge(commit)

    def _final_rows(self) -> pa.Table:
        entries = np.flatnonzero(self.collapsed.final >= 0)
        return pa.table(dict(zip(self.names(), (values for values, _ in self.values(entries)), strict=True)))

    def names(self) -> list[str]:
        return list(lake_schema(self.relation, self.options).names)

    def values(self, entries: Ints) -> Iterator[tuple[pa.Array, Bools | None]]:
        """Yield, for each lake column, the typed final values, and where the lake's are kept (or None)."""
        partitions, partition = self._partitions, None
        for typed in typed_columns(self.relation, self.options):
            if typed.index is None:
                yield pa.nulls(len(entries), typed.lake_type), None
                continue
            texts, keep = self.collapsed.texts(typed.index, entries)
            values = typed.parse(texts)
            yield values, keep
            if partitions is not None and typed.index == partitions.typed.index:
                partition = partitions.texts(values), keep
        last = self.collapsed.last[entries]
        if self.options.commit_lsn_column:
            yield take(array_of(self.changes, "commit_lsn", pa.int64()), last), None
        if self.options.commit_ts_column:
            yield take(array_of(self.changes, "commit_ts", pa.timestamp("us", "UTC")), last), None
        if partition is not None:
            # Where the lake's value is kept, its partition is kept, too.
            yield partition

    @property
    def _partitions(self) -> Partitioning | None:
        return partitioning(self.relation, self.options)

    def _merge(self, commit: SliceCommit) -> None:
        source, kept = self._merge_source()
        keys = {column.name: f"o{number}" for number, column in enumerate(self.relation.key_columns)}
        on_read = MergeOnRead(commit, source, keys, self.names(), _KINDS, partitions=self._partitions)
        way = commit.way(on_read.bytes_to_rewrite, source.nbytes)
        if way != "merge":
            on_read.make(way)
            return
        targets = [quote_identifier(name) for name in self.names()]
        merger = commit.merge(source, self._conditions(source), self.names())
        values = {target: f"s.c{index}" for index, target in enumerate(targets)}
        updates = {
            target: f"case when s.u{index} then t.{target} else s.c{index} end"
            if index in kept
            else f"s.c{index}"
            for index, target in enumerate(targets)
        }
        merger.when_matched_delete(f"s.kind = {_DELETE}")
        merger.when_matched_update(updates, f"s.kind = {_UPDATE}")
        merger.when_not_matched_insert(values, f"s.kind = {_INSERT}")
        # A missing row that is to be updated or deleted must stop the commit. MERGE has no other way to fail.
        fail = {target: f"case when 1 / s.zero > 0 then {value} end" for target, value in values.items()}
        merger.when_not_matched_insert(fail)
        self._check_metrics(commit.run(merger))

    def _conditions(self, source: pa.Table) -> Iterator[str]:
        """Yield the join conditions: the keys are equal to the origin keys.

        So that Delta can skip files, also yields the range of integer keys and the partitions of the keys.
        """
        for number, column in enumerate(self.relation.key_columns):
            key, origins = f"t.{quote_identifier(column.name)}", source[f"o{number}"]
            # Not null-safe on purpose: a key is never NULL, and an insert has a NULL origin and must not
            # match.
            yield f"({key} = s.o{number})"
            if pa.types.is_integer(origins.type):
                lowest, highest = pc.min_max(origins).as_py().values()
                yield f"({key} >= {lowest}) and ({key} <= {highest})"
        if self._partitions is not None:
            keys = {c.name: source[f"o{number}"] for number, c in enumerate(self.relation.key_columns)}
            yield from self._partitions.conditions(pa.table(keys))

    def _merge_source(self) -> tuple[pa.Table, set[int]]:
        """Return the source of the merge, and the numbers of the columns that have a column u….

        It has the remaining rows and then the deleted ones, with the columns o… (origin key), c… (final
        values) and u… (true where the lake's value is kept).
        """
        collapsed = self.collapsed
        alive, dead = np.flatnonzero(collapsed.final >= 0), np.flatnonzero(collapsed.final < 0)
        order = np.concatenate([alive, dead])
        columns: dict[str, pa.Array | pa.ChunkedArray] = {}
        for number, column in enumerate(self.relation.key_columns):
            texts = collapsed.key_texts(number, collapsed.origin[order])
            columns[f"o{number}"] = typed_column(column, self.relation.table, self.options).parse(texts)
        kept = set()
        for index, (values, keep) in enumerate(self.values(alive)):
            columns[f"c{index}"] = pa.chunked_array([values, pa.nulls(len(dead), values.type)])
            if keep is not None:
                kept.add(index)
                columns[f"u{index}"] = np.concatenate([keep, np.zeros(len(dead), np.bool_)])
        columns["kind"] = pa.array(self._kinds()[order])
        columns["zero"] = pa.array(np.zeros(len(order), np.int64))
        return pa.table(columns), kept

    def _kinds(self) -> Ints:
        kinds = np.where(self.collapsed.origin < 0, _INSERT, _UPDATE)
        return np.where(self.collapsed.final < 0, _DELETE, kinds)

    def _check_metrics(self, metrics: dict[str, Any]) -> None:
        """Raise LakeTableError if the MERGE changed other numbers of rows: a key is there twice then."""
        done = [metrics[f"num_target_rows_{what}"] for what in ("inserted", "updated", "deleted")]
        if done != np.bincount(self._kinds(), minlength=3).tolist():
            raise LakeTableError(f"{self.relation.table}: the lake table holds a key twice")
