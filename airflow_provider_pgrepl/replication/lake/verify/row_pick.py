"""Whole rows, collected by their hashes from either side of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.verify.buckets import (
    R1,
    R2,
    Collection,
    RowShape,
    column_hash,
)
from airflow_provider_pgrepl.replication.lake.verify.row_hashes import Hashes, RowHashes
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes

MOST_BYTES = 256 << 20
"""The most bytes of rows that are collected, uncompressed: they are held in memory."""


@dataclass
class RowPick:
    """Collects whole rows by their hashes. `wanted`: the halves of the wanted hashes, a pair for each.

    Raises LakeTableError if the rows have more than MOST_BYTES.
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
        return pa.concat_tables(self.found) if self.found else None


@dataclass(frozen=True)
class RowPicking:
    """A job for the tasks of a side: collect the rows with these hashes. Sent to each task."""

    shape: RowShape
    wanted: Hashes

    def begin(self) -> RowPick:
        return RowPick(self.shape, self.wanted)

    def merge(self, results: Iterable[pa.Table | None]) -> pa.Table | None:
        """Return the rows that the tasks collected, None if there are none. Raises LakeTableError if they
        have more than MOST_BYTES."""
        found, size = [], 0
        for rows in results:
            if rows is not None:
                found.append(rows)
                size += rows.nbytes
                _check_size(size)
        return pa.concat_tables(found) if found else None


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise LakeTableError(f"the rows that differ have more than {show_bytes(MOST_BYTES)}")


Job = Collection | RowPicking
"""A job for the tasks of a side."""
