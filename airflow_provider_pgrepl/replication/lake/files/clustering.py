"""Rows ordered by some columns, so that similar values lie together and the others need not be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pyarrow as pa

_RUN_BYTES = 128 << 20
"""Of rows that are ordered at once, uncompressed: the longer, the more memory it takes."""
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 64 << 10


def clustered(parts: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of all parts, in small batches, and in runs each of which is ordered by the columns, as far as
    there are any that can order rows: nested values cannot."""
    run: list[pa.Table] = []
    size = 0
    for part in parts:
        run.append(part)
        size += part.nbytes
        if size >= _RUN_BYTES:
            yield from _ordered(run, columns)
            run, size = [], 0
    if run:
        yield from _ordered(run, columns)


def _ordered(run: Sequence[pa.Table], columns: Sequence[str]) -> list[pa.RecordBatch]:
    rows = pa.concat_tables(run)
    most = max(1, min(_BATCH_ROWS, _BATCH_BYTES * len(rows) // max(rows.nbytes, 1)))
    names = [
        name
        for name in columns
        if name in rows.schema.names and not pa.types.is_nested(rows.schema.field(name).type)
    ]
    if names:
        rows = rows.sort_by([(name, "ascending") for name in names])
    return list(rows.to_batches(max_chunksize=most))
