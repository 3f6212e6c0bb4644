"""What rows are looked for in data files: which files may have any, and which of their rows may be some."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile
from airflow_provider_pgrepl.replication.lake.row_codes import Ints

_NOTHING = np.empty(0, np.int64)


class Search:
    """A search for the rows that equal one of `wanted`, whose rows differ, in its columns."""

    def __init__(self, wanted: pa.Table) -> None:
        self.wanted = wanted
        self._telling = self._telling_column()

    @property
    def is_exact(self) -> bool:
        """Whether `by_one_column` tells all: there is no other column."""
        return self._telling is not None and self.wanted.num_columns == 1

    def may_be_in(self, file: LiveFile) -> bool:
        """Whether the bounds that the log has of a file leave room for one of the rows."""
        least, most = (file.statistics.get(side, {}) for side in ("minValues", "maxValues"))
        for name, values in self._integers.items():
            if name in least and name in most:
                first = np.searchsorted(values, least[name])
                if first == len(values) or values[first] > most[name]:
                    return False
        return len(self.wanted) > 0

    def by_one_column(self, read: Callable[[str], pa.ChunkedArray]) -> tuple[Ints, Ints]:
        """The rows of a file, ascending, that may be wanted; and which, if `is_exact`, they are.

        `read` gives a column of the file, all of its rows.
        """
        if self._telling is None:
            count = len(read(self.wanted.schema.names[0]))
            return np.arange(count), np.full(count, -1, np.int64)
        values = read(self._telling)
        found = pc.index_in(values, self._value_set) if self.is_exact else pc.is_in(values, self._value_set)
        if not self.is_exact:
            rows = pc.indices_nonzero(found).to_numpy().astype(np.int64)
            return rows, np.full(len(rows), -1, np.int64)
        rows = np.flatnonzero(found.is_valid().to_numpy())
        which = found.drop_null().to_numpy().astype(np.int64)
        return (rows, which) if len(rows) else (_NOTHING, _NOTHING)

    @cached_property
    def _value_set(self) -> pa.Array:
        return self.wanted[self._telling].combine_chunks()

    @cached_property
    def _integers(self) -> dict[str, Ints]:
        """The values of columns of integers, ascending, where there is no null among them."""
        return {
            field.name: np.sort(self.wanted[field.name].to_numpy())
            for field in self.wanted.schema
            if pa.types.is_signed_integer(field.type) and self.wanted[field.name].null_count == 0
        }

    def _telling_column(self) -> str | None:
        """The column that tells most rows apart; equality of nested and of floating values is not Arrow's."""
        plain = [
            field.name
            for field in self.wanted.schema
            if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
        ]
        return max(plain, key=lambda name: len(self.wanted[name].unique()), default=None)
