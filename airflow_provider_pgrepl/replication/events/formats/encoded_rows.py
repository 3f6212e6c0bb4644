"""The rows before and after changes, as records in Avro's binary encoding."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.avro.columns import CreekColumn
from airflow_provider_pgrepl.replication.lake.merge.changes import TEXTS, array_of
from airflow_provider_pgrepl.replication.lake.merge.tuples import Ints, Tuples
from airflow_provider_pgrepl.replication.postgres.names import TableName

NOTHING, RECORD = b"\x00", b"\x02"
"""The branches of `["null", record]`."""


@dataclass(frozen=True)
class EncodedRows:
    """Of each change the row after it, that before it as far as it was sent, and the key of that after it:
    each as its record in a union with null, or empty where there is none. `missing`: by number of the change,
    columns that nobody sent; they are NULL in `after`."""

    after: list[bytes]
    before: list[bytes]
    keys: list[bytes]
    missing: Mapping[int, Sequence[int]]

    @classmethod
    def of(
        cls, rows: pa.Table, columns: Mapping[int, CreekColumn], width: int, table: TableName
    ) -> EncodedRows:
        """`columns`: by place in the stream, of `width` columns. Raises ValueRangeError."""
        keys = {index: column for index, column in columns.items() if column.is_key}
        ops, unchanged = rows["op"].to_pylist(), rows["unchanged"].to_pylist()
        # A TRUNCATE has no row on either side.
        numbers = np.array([place for place, op in enumerate(ops) if op != "T"], np.int64)
        with_rows = rows.take(pa.array(numbers))
        old, new = (
            _Side(Tuples(array_of(with_rows, side, TEXTS), width, table), numbers, len(ops))
            for side in ("old", "new")
        )
        missing = new.fill(unchanged, old, keys) if any(unchanged) else {}
        return cls(new.records(columns), old.records(keys), new.records(keys), missing)


class _Side:
    """The rows before, or after, of some changes; each by the number of its change."""

    def __init__(self, tuples: Tuples, numbers: Ints, count: int) -> None:
        self._tuples = tuples
        self.numbers: list[int] = numbers[tuples.present].tolist()
        self._count = count
        self._filled: dict[int, dict[int, str | None]] = {}
        self._columns: dict[int, list[bytes]] = {}

    def fill(
        self, unchanged: Sequence[Sequence[int] | None], old: _Side, keys: Collection[int]
    ) -> dict[int, list[int]]:
        """Give values that updates did not send as the old row has them; of each change, by number, those
        columns that nobody has."""
        missing: dict[int, list[int]] = {}
        olds = {index: dict(zip(old.numbers, old.texts(index).to_pylist(), strict=True)) for index in keys}
        for number in self.numbers:
            for index in unchanged[number] or ():
                if number in olds.get(index, ()):
                    self._filled.setdefault(index, {})[number] = olds[index][number]
                else:
                    missing.setdefault(number, []).append(index)
        return missing

    def texts(self, index: int) -> pa.Array:
        """Of one column."""
        texts = self._tuples.column(index)
        if index not in self._filled:
            return texts
        filled = self._filled[index]
        found = [
            filled.get(number, text) for number, text in zip(self.numbers, texts.to_pylist(), strict=True)
        ]
        return pa.array(found, texts.type)

    def records(self, columns: Mapping[int, CreekColumn]) -> list[bytes]:
        """Of each change's row these columns, as the record in its union; empty where there is no row."""
        found = [b""] * self._count
        if not self.numbers:
            return found
        encoded = [self._encoded(index, column) for index, column in columns.items()]
        join = b"".join
        if encoded:
            for number, values in zip(self.numbers, zip(*encoded, strict=True), strict=True):
                found[number] = RECORD + join(values)
        else:
            for number in self.numbers:
                found[number] = RECORD
        return found

    def _encoded(self, index: int, column: CreekColumn) -> list[bytes]:
        if index not in self._columns:
            self._columns[index] = column.encode(self.texts(index))
        return self._columns[index]
