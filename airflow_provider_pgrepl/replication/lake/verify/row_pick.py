"""Whole rows, collected by their hashes from either side of a comparison."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

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
from airflow_provider_pgrepl.replication.lake.verify.row_hashes import Hashes
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

    def add(self, rows: pa.Table | pa.RecordBatch) -> None:
        _, whole = self.shape.hash_rows(rows)
        may_be = np.flatnonzero(np.isin(whole.h1, self.wanted[:, 0]))
        if not len(may_be):
            return
        pairs = set(map(tuple, self.wanted.tolist()))
        halves = zip(whole.h1[may_be].tolist(), whole.h2[may_be].tolist(), strict=True)
        chosen = may_be[np.fromiter((pair in pairs for pair in halves), np.bool_, len(may_be))]
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
