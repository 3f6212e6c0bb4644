"""The changes of one relation as `collapse` reads them: ops, rows before and after, and unchanged values.

An unchanged value is one that the server did not send with an update, because the update did not change it.
An update that moves a row into the publication's row filter is sent as an insert, which may lack such values.
Nothing has them: the row was not published before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import DriftError, IdentityError, LakeTableError, Remedy
from airflow_provider_pgrepl.replication.postgres.names import TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation

from .kernels import hash_texts

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_INSERT, _UPDATE, _DELETE, _TRUNCATE = (ord(letter) for letter in "IUDT")
TEXTS = pa.large_list(pa.large_string())


class RowImages:
    """One side (`new` or `old`) of some changes of one relation.

    `present`: True for each change that has a tuple. `place`: the offset of its tuple among the tuples.
    Raises DriftError if a tuple does not have `width` values: then it belongs to another relation.
    """

    def __init__(self, lists: pa.Array, width: int, table: TableName) -> None:
        self.present: Bools = lists.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(lists.offsets.to_numpy())
        if bool((lengths[self.present] != width).any()):
            raise DriftError(
                f"{table}: changes have another number of columns than the table has ({width})",
                f"the table was altered: {errors.resnapshot(table)}",
            )
        self.width = width
        self._texts: pa.Array = lists.flatten()
        self.count = int(self.present.sum())
        self.place: Ints = np.cumsum(self.present, dtype=np.int64) - 1

    def column(self, index: int, rows: Ints | None = None) -> pa.Array:
        """Return the text values of one column, of all tuples or of the changes `rows` (negative: null)."""
        if rows is None:
            return self._texts.take(pa.array(np.arange(index, len(self._texts), self.width)))
        return take(self._texts, np.where(rows < 0, -1, self.place[rows] * self.width + index))

    def hashes(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """Return a hash of each value, in a row for each tuple and a column for each column."""
        valid = self._texts.is_valid().to_numpy(zero_copy_only=False)
        if len(valid) == 0:
            return np.empty((0, self.width), np.uint64)
        _, offsets, data = self._texts.buffers()
        places = np.frombuffer(offsets, np.int64)[self._texts.offset :][: len(valid) + 1]
        texts = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        hashes: np.ndarray[Any, np.dtype[np.uint64]] = hash_texts(places, texts, valid)
        return hashes.reshape(-1, self.width)


def take(values: pa.Array, indexes: Ints) -> pa.Array:
    """Return `values[indexes]`, with null for negative indexes."""
    missing = indexes < 0
    return values.take(pa.array(indexes, mask=missing) if missing.any() else pa.array(indexes))


def replaced(values: pa.Array, where: Bools, others: pa.Array) -> pa.Array:
    """Return `values`, those at `where` replaced by `others` in order. Any type is allowed, also nested."""
    places = np.arange(len(values), dtype=np.int64)
    places[where] = len(values) + np.arange(len(others))
    return pa.concat_arrays([values, others.cast(values.type)]).take(pa.array(places))


def bytes_before(lists: pa.Array) -> Ints:
    """Return, for each row of a list column, the bytes of text before it; the last entry is the total."""
    child = lists.values
    if len(child) == 0:
        return np.zeros(len(lists) + 1, np.int64)
    offsets = np.frombuffer(child.buffers()[1], np.int64)[child.offset :]
    return np.asarray(offsets[lists.offsets.to_numpy()], np.int64)


def unchanged_pairs(unchanged: pa.Array) -> tuple[Ints, Ints]:
    """Return the values that the server did not send: their rows, ascending, and their columns' indexes."""
    if unchanged.null_count == len(unchanged):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = pc.list_parent_indices(unchanged).to_numpy()
    return rows.astype(np.int64), unchanged.flatten().to_numpy().astype(np.int64)


@dataclass(frozen=True)
class Unchanged:
    """Values that updates did not send: for each its `row`, and the index of its column in `columns`."""

    row: Ints
    number: Ints
    columns: Ints


@dataclass(frozen=True)
class ChangedRows:
    """Changes other than TRUNCATE, numbered from 0.

    `places`: the index of each among the changelog rows given. `truncates`: for each TRUNCATE, the number of
    the change that follows it, ascending; `truncate_places`: its own index among the changelog rows.
    `unchanged_row`, `unchanged_column`: change and column of each value that an update did not send.
    """

    op: Bytes
    new: RowImages
    old: RowImages
    unchanged_row: Ints
    unchanged_column: Ints
    places: Ints
    truncates: Ints
    truncate_places: Ints

    def unchanged_beside_key(self, relation: Relation) -> Unchanged:
        """Return the values, in columns outside the key, that were not sent. Every change has its key."""
        is_key = np.array([column.is_key for column in relation.columns])
        beside_key = ~is_key[self.unchanged_column]
        columns, number = np.unique(self.unchanged_column[beside_key], return_inverse=True)
        return Unchanged(self.unchanged_row[beside_key], number.astype(np.int64), columns)

    @property
    def truncated(self) -> bool:
        return len(self.truncates) > 0

    def after(self, index: int) -> pa.Array:
        """Return the text values of a column in the new rows.

        A value that was not sent is taken from the old row, or is null without one.
        """
        texts = self.new.column(index)
        unchanged = self.unchanged_row[self.unchanged_column == index]
        if len(unchanged) == 0:
            return texts
        mask = np.zeros(len(texts), np.bool_)
        mask[self.new.place[unchanged]] = True
        before = self.old.column(index, np.where(self.old.present[unchanged], unchanged, -1))
        return pc.replace_with_mask(texts, pa.array(mask), before)


def read_changes(changes: pa.Table, relation: Relation, *, whole: bool = False) -> ChangedRows:
    """Read changelog rows of one relation: all of them if `whole`, else those after the last TRUNCATE.

    Raises DriftError if rows have another number of columns than the relation, LakeTableError if a change is
    not valid for the relation, IdentityError if an insert lacks values.
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
    new = RowImages(array_of(changes, "new", TEXTS), width, relation.table)
    old = RowImages(array_of(changes, "old", TEXTS), width, relation.table)
    _check_complete(op, new, old, relation)
    unchanged_row, unchanged_column = unchanged_pairs(array_of(changes, "unchanged", pa.list_(pa.int16())))
    if bool((op[unchanged_row] == _DELETE).any() or (unchanged_column >= width).any()):
        raise contradiction(relation, "a change that adds no row of its columns lacks values")
    _check_inserts(unchanged_column[op[unchanged_row] == _INSERT], relation)
    truncates = np.searchsorted(places, truncate_places)
    return ChangedRows(op, new, old, unchanged_row, unchanged_column, places, truncates, truncate_places)


def _check_inserts(unsent: Ints, relation: Relation) -> None:
    """Raise IdentityError if inserts lack values of columns that the lake has. `unsent`: their indexes."""
    found = [relation.columns[index] for index in np.unique(unsent).tolist()]
    names = [show_identifier(column.name) for column in found if column.attnum not in relation.ignored]
    if not names:
        return
    columns, values = ("column", "a large value") if len(names) == 1 else ("columns", "large values")
    raise IdentityError(
        f"{relation.table}: an UPDATE moved a row into the publication's row filter, and the server did not"
        f" send {columns} {', '.join(names)}, {values} that the UPDATE did not change",
        f"ALTER TABLE {relation.table} REPLICA IDENTITY FULL, with which the server sends such values (not if"
        f" the publication has a column list for it); then {errors.resnapshot(relation.table)}",
        Remedy.RESNAPSHOT,
    )


def contradiction(relation: Relation, what: str) -> LakeTableError:
    """Return the error for a table whose changes contradict each other. `what`: a clause that says how."""
    return LakeTableError(f"{relation.table}: the changelog is inconsistent: {what}")


def array_of(changes: pa.Table, name: str, wanted: pa.DataType) -> pa.Array:
    """Return a column of the changelog as one array of the type `wanted`."""
    column = changes[name].combine_chunks() if changes[name].num_chunks != 1 else changes[name].chunk(0)
    return column if column.type == wanted else column.cast(wanted)


def _ops(changes: pa.Table) -> Bytes:
    """Return the ops as bytes. Each op is one character, so these are the data of the string array."""
    op = array_of(changes, "op", pa.string())
    if len(op) == 0:
        return np.empty(0, np.uint8)
    start = np.frombuffer(op.buffers()[1], np.int32)[op.offset]
    return np.frombuffer(op.buffers()[2], np.uint8)[start : start + len(op)]


def _check_complete(op: Bytes, new: RowImages, old: RowImages, relation: Relation) -> None:
    deletes = op == _DELETE
    if bool((~np.isin(op, (_INSERT, _UPDATE, _DELETE))).any()):
        raise contradiction(relation, "it holds an operation that is none of a table")
    if bool((new.present == deletes).any()) or bool((~old.present[deletes]).any()):
        raise contradiction(relation, "a change lacks its row")
    if relation.replica_identity == "f" and bool((~old.present[op != _INSERT]).any()):
        raise contradiction(relation, "a change lacks the old row")
