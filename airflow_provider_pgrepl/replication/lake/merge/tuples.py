"""The lists of texts `new` and `old` of the changelog's rows, read by column and never as Python rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import DriftError
from airflow_provider_pgrepl.replication.lake.merge.kernels import hash_texts
from airflow_provider_pgrepl.replication.postgres.names import TableName

Ints = np.ndarray[Any, np.dtype[np.int64]]
Bools = np.ndarray[Any, np.dtype[np.bool_]]


class Tuples:
    """One side (`new` or `old`) of some changes of one relation.

    Raises DriftError when a tuple has not `width` values: then the relation was another one.
    """

    def __init__(self, lists: pa.Array, width: int, table: TableName) -> None:
        self.present: Bools = lists.is_valid().to_numpy(zero_copy_only=False)
        lengths = np.diff(lists.offsets.to_numpy())
        if bool((lengths[self.present] != width).any()):
            raise DriftError(
                f"{table}: changes have another number of columns than the table has ({width})",
                f"the table was altered: {hints.resnapshot(table)}",
            )
        self.width = width
        self._texts: pa.Array = lists.flatten()
        self.count = int(self.present.sum())
        self.place: Ints = np.cumsum(self.present, dtype=np.int64) - 1

    def column(self, index: int, rows: Ints | None = None) -> pa.Array:
        """Texts of one column, of all rows that have a tuple, or of `rows` (negative: null)."""
        if rows is None:
            return self._texts.take(pa.array(np.arange(index, len(self._texts), self.width)))
        return take(self._texts, np.where(rows < 0, -1, self.place[rows] * self.width + index))

    def hashes(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        """A hash of each value, by tuple and column."""
        valid = self._texts.is_valid().to_numpy(zero_copy_only=False)
        if len(valid) == 0:
            return np.empty((0, self.width), np.uint64)
        _, offsets, data = self._texts.buffers()
        places = np.frombuffer(offsets, np.int64)[self._texts.offset :][: len(valid) + 1]
        texts = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        hashes: np.ndarray[Any, np.dtype[np.uint64]] = hash_texts(places, texts, valid)
        return hashes.reshape(-1, self.width)


def take(values: pa.Array, indexes: Ints) -> pa.Array:
    """`values[indexes]`; a negative index gives null."""
    missing = indexes < 0
    return values.take(pa.array(indexes, mask=missing) if missing.any() else pa.array(indexes))


def replaced(values: pa.Array, where: Bools, others: pa.Array) -> pa.Array:
    """`values`, and `others`, in their order, `where` it is said; of any type, nested ones too."""
    places = np.arange(len(values), dtype=np.int64)
    places[where] = len(values) + np.arange(len(others))
    return pa.concat_arrays([values, others.cast(values.type)]).take(pa.array(places))


def bytes_before(lists: pa.Array) -> Ints:
    """How many bytes of text lie before each row of a list column, and at the end all of them."""
    child = lists.values
    if len(child) == 0:
        return np.zeros(len(lists) + 1, np.int64)
    offsets = np.frombuffer(child.buffers()[1], np.int64)[child.offset :]
    return np.asarray(offsets[lists.offsets.to_numpy()], np.int64)


def unchanged_pairs(unchanged: pa.Array) -> tuple[Ints, Ints]:
    """Which columns the server did not send: rows, ascending, and for each the column's index."""
    if unchanged.null_count == len(unchanged):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    rows = pc.list_parent_indices(unchanged).to_numpy()
    return rows.astype(np.int64), unchanged.flatten().to_numpy().astype(np.int64)
