"""Places: where rows of a table lie, each in its file."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from airflow_provider_pgrepl.replication.lake.files.row_equality import Ints


@dataclass(frozen=True)
class Places:
    """Rows of a table's files, in the order of the files and of the rows in each.

    `file`: its number; `row`: the row's in it, from 0, counting those that are gone; `which`: the number of
    the wanted row that it equals.
    """

    file: Ints
    row: Ints
    which: Ints

    def __len__(self) -> int:
        return len(self.file)

    def by_file(self) -> list[tuple[int, Ints]]:
        """The number of each file that has any, and the rows in it."""
        files, starts = np.unique(self.file, return_index=True)
        ends = [*starts[1:].tolist(), len(self)]
        return [
            (file, self.row[start:end])
            for file, start, end in zip(files.tolist(), starts.tolist(), ends, strict=False)
        ]

    def marks(self) -> dict[int, BitMap64]:
        """By the number of each file that has any, the rows in it."""
        return {file: BitMap64(rows.tolist()) for file, rows in self.by_file()}

    def where(self, chosen: np.ndarray) -> Places:
        """Some of them, by a mask or by numbers."""
        return Places(self.file[chosen], self.row[chosen], self.which[chosen])
