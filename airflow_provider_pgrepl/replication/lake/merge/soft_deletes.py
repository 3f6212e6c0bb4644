"""What each key is to hold into its lake table, where deleted or truncated rows may stay there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.held_keys import HeldKeys
from airflow_provider_pgrepl.replication.lake.merge.merge_on_read import Kinds, MergeOnRead
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import MISSING, SliceCommit
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, Ints, replaced, take
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import (
    COMMIT_LSN,
    COMMIT_TS,
    DELETED,
    Partitioning,
    TypedColumn,
    lake_schema,
    partitioning,
    typed_column,
    typed_columns,
)

# What becomes of the lake's row under a key: it must be there and changes; it changes if it is there, else
# one comes; it must be there and goes; it goes if it is there.
_UPDATE, _PUT, _DELETE, _CLEAR = range(4)
_STAMPS = {COMMIT_LSN: "commit_lsn", COMMIT_TS: "commit_ts"}
_KINDS = Kinds(there=(_UPDATE, _DELETE), goes=(_DELETE, _CLEAR), comes=(_PUT,))


@dataclass(frozen=True)
class KeysCommit:
    """One slice of changes, followed by key, to become one commit."""

    held: HeldKeys
    changes: pa.Table
    relation: Relation
    choices: TableChoices

    def make(self, commit: SliceCommit) -> None:
        """Raises LakeTableError when a row that must be there is missing, or a key is there twice."""
        if len(self.held) == 0 and self.held.truncated < 0:
            commit.nothing()
            return
        source, kept = self._source(commit)
        names = self._names()
        keys = {column.name: f"k{number}" for number, column in enumerate(self.relation.key_columns)}
        gone_mark = DELETED if self.soft else None
        on_read = MergeOnRead(commit, source, keys, names, _KINDS, gone_mark, self._partitions)
        # A TRUNCATE that leaves rows behind changes every row there is.
        is_truncated = self.held.truncated >= 0
        if is_truncated and commit.is_ours:
            on_read.rewrite(self._marked_by_truncate)
            return
        way = "merge" if is_truncated else commit.way(on_read.bytes_to_rewrite, source.nbytes)
        if way != "merge":
            on_read.make(way)
            return
        merger = commit.merge(source, self._conditions(source), names)
        fresh = {quote_identifier(name): f"s.c{index}" for index, name in enumerate(names)}
        changed = {
            target: f"case when s.u{index} then t.{target} else s.c{index} end"
            if index in kept
            else f"s.c{index}"
            for index, target in enumerate(fresh)
        }
        if self.soft:
            mark = quote_identifier(DELETED)
            gone_before = f"s.kind = {_UPDATE} and t.{mark}"
            changed[mark] = f"case when {gone_before} then 1 / s.zero > 0 else {changed[mark]} end"
        merger.when_matched_delete(f"s.kind >= {_DELETE}")
        merger.when_matched_update(changed, f"s.kind < {_DELETE}")
        merger.when_not_matched_insert(fresh, f"s.kind = {_PUT}")
        # A row that is not there, or has gone before, must stop the commit; MERGE has no other way to say so.
        fail = {target: f"case when 1 / s.zero > 0 then {value} end" for target, value in fresh.items()}
        merger.when_not_matched_insert(fail, f"s.kind = {_UPDATE} or s.kind = {_DELETE}")
        if self.held.truncated >= 0:
            self._mark_all_others(merger)
        self._check(commit.run(merger))

    def _names(self) -> list[str]:
        return list(lake_schema(self.relation, self.choices).names)

    @property
    def soft(self) -> bool:
        return self.choices.policy.deletes == "soft"

    def _kinds(self) -> Ints:
        held = self.held
        if self.soft:
            return np.where(held.in_lake, _UPDATE, _PUT)
        return np.where(held.in_lake, _UPDATE, _PUT) + np.where(held.gone, _DELETE, 0)

    def _conditions(self, source: pa.Table) -> Iterator[str]:
        keys = {}
        for number, column in enumerate(self.relation.key_columns):
            yield f"(t.{quote_identifier(column.name)} = s.k{number})"
            keys[column.name] = source[f"k{number}"]
        if self._partitions is not None and self.held.truncated < 0:
            yield from self._partitions.conditions(pa.table(keys))

    def _marked_by_truncate(self, rows: pa.Table) -> pa.Table:
        """What `_mark_all_others` does, to rows."""
        live, at = pc.invert(rows[DELETED]), self.held.truncated
        marks = {DELETED: pa.scalar(True)}
        marks |= {name: self.changes[source][at] for name, source in _STAMPS.items()}
        for number, field in enumerate(rows.schema):
            if field.name in marks:
                marked = pc.if_else(live, marks[field.name].cast(field.type), rows[field.name])
                rows = rows.set_column(number, field, marked)
        return rows

    def _mark_all_others(self, merger: Any) -> None:
        """TRUNCATE: rows that no later change concerns; those marked before keep the moment of their end."""
        at = self.held.truncated
        marks = {quote_identifier(DELETED): "true"}
        if self.choices.commit_lsn_column:
            marks[quote_identifier(COMMIT_LSN)] = str(self.changes["commit_lsn"][at].as_py())
        if self.choices.commit_ts_column:
            micros = self.changes["commit_ts"][at].cast(pa.int64()).as_py()
            marks[quote_identifier(COMMIT_TS)] = (
                f"arrow_cast({micros}, 'Timestamp(Microsecond, Some(\"UTC\"))')"
            )
        merger.when_not_matched_by_source_update(marks, f"not t.{quote_identifier(DELETED)}")

    def values(self) -> Iterator[tuple[pa.Array, Bools | None]]:
        """Typed values by lake column, and where the value of the origin's row in the lake stays."""
        partitions, partition = self._partitions, None
        for typed in typed_columns(self.relation, self.choices):
            if typed.index is None:
                yield pa.nulls(len(self.held), typed.lake_type), None
                continue
            texts, keep = self.held.texts(typed.index)
            found = typed.parse(texts), keep if keep.any() else None
            yield found
            if partitions is not None and typed.index == partitions.typed.index:
                partition = partitions.texts(found[0]), found[1]
        if self.soft:
            yield pa.array(self.held.gone), None
        if self.choices.commit_lsn_column:
            yield take(array_of(self.changes, "commit_lsn", pa.int64()), self.held.since), None
        if self.choices.commit_ts_column:
            yield take(array_of(self.changes, "commit_ts", pa.timestamp("us", "UTC")), self.held.since), None
        if partition is not None:
            yield partition

    @property
    def _partitions(self) -> Partitioning | None:
        return partitioning(self.relation, self.choices)

    def _source(self, commit: SliceCommit) -> tuple[pa.Table, set[int]]:
        """Keys k…, values c…, u… where the value stays that the lake has under that key."""
        held, columns, kept = self.held, dict[str, Any](), set[int]()
        kinds, at_origin = self._kinds(), self.held.origin == self.held.code
        for number, key in enumerate(self._key_columns()):
            columns[f"k{number}"] = key.parse(held.key_texts(number, held.code))
        lake = _LakeValues(self, commit)
        for index, (name, (values, keep)) in enumerate(zip(self._names(), self.values(), strict=True)):
            columns[f"c{index}"] = values
            if keep is None:
                continue
            from_elsewhere = keep & ~at_origin & (kinds < _DELETE)
            if from_elsewhere.any():
                columns[f"c{index}"] = lake.filled(name, values, from_elsewhere)
            if (keep & at_origin).any():
                kept.add(index)
                columns[f"u{index}"] = keep & at_origin
        columns["kind"] = pa.array(kinds)
        columns["zero"] = pa.array(np.zeros(len(held), np.int64))
        return pa.table(columns), kept

    def _key_columns(self) -> list[TypedColumn]:
        return [
            typed_column(column, self.relation.table, self.choices) for column in self.relation.key_columns
        ]

    def _check(self, metrics: dict[str, Any]) -> None:
        """A key that the lake holds twice is changed twice."""
        counts = np.bincount(self._kinds(), minlength=4).tolist()
        changed = metrics["num_target_rows_inserted"] + metrics["num_target_rows_updated"]
        deleted = metrics["num_target_rows_deleted"]
        others = self.held.truncated >= 0 or changed == counts[_UPDATE] + counts[_PUT]
        if not others or not counts[_DELETE] <= deleted <= counts[_DELETE] + counts[_CLEAR]:
            raise LakeTableError(f"{self.relation.table}: the lake table holds a key twice")


class _LakeValues:
    """Values that a row takes along to another key: they are in the lake only, under the key it had there."""

    def __init__(self, keys: KeysCommit, commit: SliceCommit) -> None:
        self._keys = keys
        self._commit = commit
        self._rows: pa.Table | None = None
        self._row_of: Ints = np.empty(0, np.int64)

    def filled(self, name: str, values: pa.Array, where: Bools) -> pa.Array:
        """`values`, and where it is said those that the lake has in column `name`."""
        if self._rows is None:
            self._read()
        assert self._rows is not None
        rows = self._row_of[where]
        if bool((rows < 0).any()):
            raise LakeTableError(f"{self._keys.relation.table}: {MISSING}")
        return replaced(values, where, take(self._rows[name].combine_chunks(), rows))

    def _read(self) -> None:
        """The lake's rows under the keys from which rows have moved, with all their values."""
        held, typed = self._keys.held, self._keys._key_columns()
        moved = np.flatnonzero((held.origin >= 0) & (held.origin != held.code))
        origins = np.unique(held.origin[moved])
        wanted = pa.table(
            {key.name: key.parse(held.key_texts(number, origins)) for number, key in enumerate(typed)}
        )
        names = [column.name for column in typed_columns(self._keys.relation, self._keys.choices)]
        partitions = self._keys._partitions
        if partitions is not None:
            names.append(PARTITION)
        commit = self._commit
        lake = FileRows(commit.table)
        may_be_in = None if partitions is None else partitions.of_rows(wanted)
        places = commit.read(lambda: lake.find(wanted, may_be_in))
        rows, which = lake.rows(places, names), places.which
        self._rows = rows
        row_of = np.full(
            int(held.code.max(initial=-1)) + 1 + int(held.origin.max(initial=-1)) + 1, -1, np.int64
        )
        row_of[origins[which]] = np.arange(len(rows))
        self._row_of = np.where(held.origin >= 0, row_of[held.origin], -1)
