"""The changes of one relation as collapse reads them: ops, rows before and after, what was not sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.merge.tuples import Ints, Tuples, unchanged_pairs
from airflow_provider_pgrepl.replication.postgres.relation import Relation

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_INSERT, _UPDATE, _DELETE, _TRUNCATE = (ord(letter) for letter in "IUDT")
TEXTS = pa.large_list(pa.large_string())


@dataclass(frozen=True)
class Unchanged:
    """Values that updates did not send: of each the row, and the number of its column among `columns`."""

    row: Ints
    number: Ints
    columns: Ints


@dataclass(frozen=True)
class ChangedRows:
    """Changes without the TRUNCATEs among them, numbered from 0.

    `places`: where each stands among the changes given. `truncates`: the number of the change that follows
    each TRUNCATE, ascending; `truncate_places`: where those themselves stand. `unchanged_row`,
    `unchanged_column`: which columns an update did not send.
    """

    op: Bytes
    new: Tuples
    old: Tuples
    unchanged_row: Ints
    unchanged_column: Ints
    places: Ints
    truncates: Ints
    truncate_places: Ints

    def unchanged_beside_key(self, relation: Relation) -> Unchanged:
        """The values that were not sent and that the key, which every change carries, does not tell."""
        is_key = np.array([column.is_key for column in relation.columns])
        beside_key = ~is_key[self.unchanged_column]
        columns, number = np.unique(self.unchanged_column[beside_key], return_inverse=True)
        return Unchanged(self.unchanged_row[beside_key], number.astype(np.int64), columns)

    @property
    def truncated(self) -> bool:
        return len(self.truncates) > 0

    def after(self, index: int) -> pa.Array:
        """Texts of a column after each change that has a new row; what was not sent is taken from the old."""
        texts = self.new.column(index)
        unchanged = self.unchanged_row[self.unchanged_column == index]
        if len(unchanged) == 0:
            return texts
        mask = np.zeros(len(texts), np.bool_)
        mask[self.new.place[unchanged]] = True
        before = self.old.column(index, np.where(self.old.present[unchanged], unchanged, -1))
        return pc.replace_with_mask(texts, pa.array(mask), before)


def read_changes(changes: pa.Table, relation: Relation, *, whole: bool = False) -> ChangedRows:
    """Read changelog rows of one relation; only those after the last TRUNCATE unless the `whole` is wanted.

    Raises DriftError when rows have another number of columns than the relation, LakeTableError when a
    change is not as one of this relation must be.
    """
    op = _ops(changes)
    truncate_places = np.flatnonzero(op == _TRUNCATE)
    first = 0
    if len(truncate_places) and not whole:
        first = int(truncate_places[-1]) + 1
        changes, op = changes.slice(first), op[first:]
    places = np.arange(first, first + len(op), dtype=np.int64)
    if len(truncate_places) and whole:
        places = np.flatnonzero(op != _TRUNCATE)
        changes, op = changes.take(pa.array(places)), op[places]
    width = len(relation.columns)
    new = Tuples(array_of(changes, "new", TEXTS), width, relation.table)
    old = Tuples(array_of(changes, "old", TEXTS), width, relation.table)
    _check_complete(op, new, old, relation)
    unchanged_row, unchanged_column = unchanged_pairs(array_of(changes, "unchanged", pa.list_(pa.int16())))
    if bool((op[unchanged_row] != _UPDATE).any() or (unchanged_column >= width).any()):
        raise contradiction(relation, "a change that is no update of its columns lacks values")
    truncates = np.searchsorted(places, truncate_places)
    return ChangedRows(op, new, old, unchanged_row, unchanged_column, places, truncates, truncate_places)


def contradiction(relation: Relation, what: str) -> LakeTableError:
    """The error of a table whose changes cannot all be true; `what`, as said of the changelog."""
    return LakeTableError(f"{relation.table}: the changelog is inconsistent: {what}")


def array_of(changes: pa.Table, name: str, wanted: pa.DataType) -> pa.Array:
    """A column of the changelog as one array."""
    column = changes[name].combine_chunks() if changes[name].num_chunks != 1 else changes[name].chunk(0)
    return column if column.type == wanted else column.cast(wanted)


def _ops(changes: pa.Table) -> Bytes:
    """The ops as bytes: each is one letter, so the string array's data are they."""
    op = array_of(changes, "op", pa.string())
    if len(op) == 0:
        return np.empty(0, np.uint8)
    start = np.frombuffer(op.buffers()[1], np.int32)[op.offset]
    return np.frombuffer(op.buffers()[2], np.uint8)[start : start + len(op)]


def _check_complete(op: Bytes, new: Tuples, old: Tuples, relation: Relation) -> None:
    deletes = op == _DELETE
    if bool((~np.isin(op, (_INSERT, _UPDATE, _DELETE))).any()):
        raise contradiction(relation, "it holds an operation that is none of a table")
    if bool((new.present == deletes).any()) or bool((~old.present[deletes]).any()):
        raise contradiction(relation, "a change lacks its row")
    if relation.replica_identity == "f" and bool((~old.present[op != _INSERT]).any()):
        raise contradiction(relation, "a change lacks the old row")
