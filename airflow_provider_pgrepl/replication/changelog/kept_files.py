"""KeptFiles: small files of the changelog, as read: one has changes of many tables, and each reads it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class KeptFile:
    """The rows of a file; `order` has them by relation, whose ids are `relations`, else as they stand."""

    rows: pa.Table
    order: Ints
    relations: Ints

    @classmethod
    def of(cls, rows: pa.Table) -> KeptFile:
        """Changelog rows with their relation_id."""
        relations = rows["relation_id"].to_numpy()
        order = np.argsort(relations, kind="stable")
        return cls(rows, order, relations[order])

    def rows_of(self, relation_id: int) -> pa.Table:
        """Those of one relation."""
        first = int(np.searchsorted(self.relations, relation_id))
        last = int(np.searchsorted(self.relations, relation_id, side="right"))
        return self.rows.take(pa.array(self.order[first:last]))


class KeptFiles:
    """The last ones that were read, up to so many bytes together. By their paths: a file never changes, and
    no two have one name. Any thread may ask."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._files: OrderedDict[str, KeptFile] = OrderedDict()
        self._bytes = 0
        self._changing = threading.Lock()

    def get(self, path: str) -> KeptFile | None:
        """None when it is not among them."""
        with self._changing:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
            return file

    def keep(self, path: str, rows: pa.Table) -> KeptFile:
        """Keep a file, and as many of the others as there is room for."""
        file = KeptFile.of(rows)
        with self._changing:
            if path not in self._files:
                self._bytes += rows.nbytes
            self._files[path] = file
            while self._bytes > self._most_bytes and len(self._files) > 1:
                self._bytes -= self._files.popitem(last=False)[1].rows.nbytes
        return file
