"""The command `pgrepl sql`: a query on the lake at a point in time, without Spark, as text or Parquet."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from airflow_provider_pgrepl.errors import ConfigError, one_line
from airflow_provider_pgrepl.replication.events.changes import python_values
from airflow_provider_pgrepl.replication.events.formats.json_text import JsonRows, json_texts, json_value

Writer = Callable[[pa.RecordBatchReader, BinaryIO], None]
MOST_SHOWN = 1_000
"""The most rows that the format `table` shows: it reads them all before it knows its column widths."""
_WIDEST = 80
"""The most characters of a value that the format `table` shows."""

_AS_THEY_ARE = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_date32,
)


def writer_of(how: str) -> Writer:
    """Return the function that writes one of FORMATS. Raises ConfigError for Parquet on a terminal."""
    write = FORMATS[how]
    if write is _write_parquet and sys.stdout.isatty():
        raise ConfigError("Parquet is not for a terminal", "send it to a file, with > orders.parquet")
    return write


def _write_table(rows: pa.RecordBatchReader, out: BinaryIO) -> None:
    """Write up to MOST_SHOWN rows and their count as psql does.

    Integers and decimals are right-aligned, NULL is empty.
    """
    names = [one_line(name) for name in rows.schema.names]
    to_right = [pa.types.is_integer(kind) or pa.types.is_decimal(kind) for kind in rows.schema.types]
    lines: list[tuple[str, ...]] = []
    is_all = True
    for batch in rows:
        texts = [[_cell(text) for text in _texts(column).to_pylist()] for column in batch.columns]
        lines += zip(*texts, strict=True)
        if len(lines) > MOST_SHOWN:
            del lines[MOST_SHOWN:]
            is_all = False
            break
    widths = [max(map(len, column)) for column in zip(names, *lines, strict=True)]
    out.write(f" {' | '.join(map(str.center, names, widths))}\n".encode())
    out.write(f"{'-+-'.join('-' * width for width in widths).join('--')}\n".encode())
    for line in lines:
        cells = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, to_right, strict=True)
        )
        out.write(f" {' | '.join(cells)}\n".encode())
    count = f"{len(lines):,} row{'' if len(lines) == 1 else 's'}"
    more = "" if is_all else " of more: --format csv, json and parquet give all"
    out.write(f"({count}{more})\n".encode())


def _cell(text: str | None) -> str:
    shown = one_line(text or "")
    return shown if len(shown) <= _WIDEST else f"{shown[: _WIDEST - 1]}…"


def _write_csv(rows: pa.RecordBatchReader, out: BinaryIO) -> None:
    """Write CSV with a header. NULL is an empty field, and text values are quoted."""
    schema = _with_texts(rows.schema, _is_plain)
    with pyarrow.csv.CSVWriter(out, schema) as writer:
        for batch in rows:
            writer.write_batch(_in_schema(batch, schema))


def _write_json(rows: pa.RecordBatchReader, out: BinaryIO) -> None:
    """Write one JSON object per line, with the values that `pgrepl changes` writes."""
    lines = JsonRows(rows.schema.names)
    for batch in rows:
        columns = [json_texts(_known(column), is_json=False) for column in batch.columns]
        for line in lines.of(columns, batch.num_rows).to_pylist():
            out.write(f"{line}\n".encode())


def _write_parquet(rows: pa.RecordBatchReader, out: BinaryIO) -> None:
    schema = _with_texts(rows.schema, lambda kind: not pa.types.is_interval(kind))
    with pyarrow.parquet.ParquetWriter(_Counted(out), schema) as writer:
        for batch in rows:
            writer.write_batch(_in_schema(batch, schema))


class _Counted:
    """A pipe that counts the bytes written to it: pyarrow asks for its position."""

    closed = False

    def __init__(self, out: BinaryIO) -> None:
        self._out, self._place = out, 0

    def write(self, data: bytes) -> int:
        self._place += len(data)
        return self._out.write(data)

    def tell(self) -> int:
        return self._place

    def flush(self) -> None:
        self._out.flush()


FORMATS: dict[str, Writer] = {
    "table": _write_table,
    "csv": _write_csv,
    "json": _write_json,
    "parquet": _write_parquet,
}


def _with_texts(schema: pa.Schema, is_kept: Callable[[pa.DataType], bool]) -> pa.Schema:
    return pa.schema([field if is_kept(field.type) else field.with_type(pa.string()) for field in schema])


def _in_schema(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch in which the columns that `schema` declares as text are converted to text."""
    pairs = zip(batch.columns, schema.types, strict=True)
    return pa.record_batch([one if one.type == kind else _texts(one) for one, kind in pairs], schema=schema)


def _is_plain(kind: pa.DataType) -> bool:
    return any(is_one(kind) for is_one in _AS_THEY_ARE)


def _texts(values: pa.Array) -> pa.Array:
    """Return values as text: nested types as JSON, bytes in PostgreSQL's hex format, others as Arrow
    casts."""
    kind = values.type
    if pa.types.is_nested(kind):
        return pa.array(_each(values, json_value), pa.string())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return pa.array(_each(values, lambda value: f"\\x{value.hex()}"), pa.string())
    # Arrow cannot cast an interval to text.
    return (
        pa.array(_each(values, str), pa.string()) if pa.types.is_interval(kind) else values.cast(pa.string())
    )


def _each(values: pa.Array, text_of: Callable[[Any], str]) -> Iterator[str | None]:
    return (None if value is None else text_of(value) for value in python_values(values))


def _known(values: pa.Array) -> pa.Array:
    """Return values as text if no lake table has their type, as an interval that SQL computed."""
    kind = values.type
    is_known = pa.types.is_date32(kind) or (pa.types.is_timestamp(kind) and kind.unit == "us")
    return _texts(values) if pa.types.is_temporal(kind) and not is_known else values
