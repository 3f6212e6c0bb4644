"""Rows of the changelog with values that they lack, in pieces: one value may be that of very many rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.lake.merge.changes import array_of
from airflow_provider_pgrepl.replication.lake.merge.tuples import Bools, replaced

_PIECE_BYTES = 16 << 20

Key = tuple[str | None, ...]
"""Texts of a row's replica identity."""
Values = dict[int, str]
"""Texts by place in the stream."""


def bytes_of(values: Values) -> int:
    """How many they are at most."""
    return sum(len(text) if text.isascii() else 4 * len(text) for text in values.values())


def with_values(
    rows: pa.Table, found: Mapping[int, Values], piece_bytes: int = _PIECE_BYTES
) -> Iterator[pa.Table]:
    """Rows of ROW_SCHEMA with values by row, which `unchanged` names there and no more here; together all
    rows, and in no piece much more of these values than `piece_bytes`."""
    sizes = np.zeros(rows.num_rows, np.int64)
    for number, values in found.items():
        sizes[number] = bytes_of(values)
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // piece_bytes)) + 1
    start = 0
    for end in [*ends.tolist(), rows.num_rows]:
        some = {number - start: found[number] for number in found if start <= number < end}
        yield _filled(rows.slice(start, end - start), some)
        start = end


def _filled(rows: pa.Table, found: Mapping[int, Values]) -> pa.Table:
    if not found:
        return rows
    numbers = sorted(found)
    where: Bools = np.zeros(rows.num_rows, np.bool_)
    where[numbers] = True
    new: list[list[str | None]] = []
    unchanged: list[list[int] | None] = []
    for row in rows.select(["new", "unchanged"]).filter(pa.array(where)).to_pylist():
        values = found[numbers[len(new)]]
        new.append([values.get(place, text) for place, text in enumerate(row["new"])])
        unchanged.append([place for place in row["unchanged"] if place not in values] or None)
    for name, texts in (("new", new), ("unchanged", unchanged)):
        kind = ROW_SCHEMA.field(name).type
        column = replaced(array_of(rows, name, kind), where, pa.array(texts, kind))
        rows = rows.set_column(rows.column_names.index(name), name, column)
    return rows
