"""What rows are looked for in data files: where there may be any, and which of the rows there may be some."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.lake.row_codes import Ints

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
        """Whether there may be one of the rows where columns of integers have these bounds."""
        for name, values in self._integers.items():
            if name in least and name in most:
                first = np.searchsorted(values, least[name])
                if first == len(values) or values[first] > most[name]:
                    return False
        return len(self.wanted) > 0

    @property
    def bounded(self) -> list[str]:
        """The columns whose bounds `may_be_between` looks at."""
        return list(self._integers)

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
    def _integers(self) -> dict[str, Ints]:
        """The values of columns of integers, ascending, where there is no null among them."""
        return {
            field.name: np.sort(self.wanted[field.name].to_numpy())
            for field in self.wanted.schema
            if pa.types.is_signed_integer(field.type) and self.wanted[field.name].null_count == 0
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
