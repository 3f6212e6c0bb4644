"""What rows are looked for in data files: where there may be any, and which of the rows there may be some."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.lake.files.row_equality import Ints

_FEW = 1 << 10
"""So many candidates, or twice the rows that are wanted, are few enough to read them whole."""


class Search:
    """A search for the rows that equal one of `wanted`, whose rows differ, in its columns."""

    def __init__(self, wanted: pa.Table) -> None:
        self.wanted = wanted

    @property
    def is_exact(self) -> bool:
        """Whether `candidates` tells all: there is but one column, of a type whose equality is Arrow's."""
        return self.wanted.num_columns == 1 and len(self._plain) == 1

    def may_be_between(self, least: Mapping[str, Any], most: Mapping[str, Any]) -> bool:
        """Whether there may be one of the rows where columns have these bounds, as Parquet has them: numbers,
        days, the bytes of texts."""
        for name, values in self._ordered.items():
            if name in least and name in most:
                first = bisect_left(values, least[name])
                if first == len(values) or values[first] > most[name]:
                    return False
        return len(self.wanted) > 0

    @property
    def bounded(self) -> list[str]:
        """The columns whose bounds `may_be_between` looks at."""
        return list(self._ordered)

    @property
    def bounded_in_log(self) -> list[str]:
        """Those of them whose bounds the log of a table has as Parquet does."""
        return [name for name in self._ordered if pa.types.is_integer(self.wanted.schema.field(name).type)]

    def candidates(self, count: int, read: Callable[[str], pa.ChunkedArray]) -> tuple[Ints, Ints]:
        """Those of `count` rows, ascending, that may be wanted; and which, if `is_exact`, they are, else -1.

        `read` gives one of the columns. No more are read than it takes until few rows are left.
        """
        if self.is_exact:
            found = pc.index_in(read(self._plain[0]), self._values(self._plain[0]))
            rows = np.flatnonzero(found.is_valid().to_numpy())
            return rows, found.drop_null().to_numpy().astype(np.int64)
        may_be = np.ones(count, np.bool_)
        left = count
        for name in self._plain:
            may_be &= pc.is_in(read(name), self._values(name)).to_numpy()
            left = int(may_be.sum())
            if left <= max(_FEW, 2 * len(self.wanted)):
                break
        return np.flatnonzero(may_be), np.full(left, -1, np.int64)

    def _values(self, name: str) -> pa.Array:
        return self.wanted[name].combine_chunks()

    @cached_property
    def _ordered(self) -> dict[str, Ints | list[bytes]]:
        """The values of columns whose order is Parquet's, ascending, where there is no null among them.

        Numbers stay in an array: a merge may look for a million.
        """
        return {
            field.name: _ascending(self._values(field.name).cast(as_bounds))
            for field in self.wanted.schema
            if (as_bounds := _as_bounds(field.type)) and self.wanted[field.name].null_count == 0
        }

    @cached_property
    def _plain(self) -> list[str]:
        """The columns by whose values rows can be told apart, those first that tell most; equality of nested
        and of floating values is not Arrow's."""
        plain = [
            field.name
            for field in self.wanted.schema
            if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
        ]
        return sorted(plain, key=lambda name: -len(self.wanted[name].unique()))


def _ascending(values: pa.Array) -> Ints | list[bytes]:
    if pa.types.is_integer(values.type):
        return np.sort(values.to_numpy())
    return sorted(values.to_pylist())


def _as_bounds(kind: pa.DataType) -> pa.DataType | None:
    """The type in which Parquet orders values of a type; None where we do not rely on its order."""
    if pa.types.is_signed_integer(kind):
        return kind
    if pa.types.is_date32(kind):
        return pa.int32()
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)
    return pa.large_binary() if is_text else None
