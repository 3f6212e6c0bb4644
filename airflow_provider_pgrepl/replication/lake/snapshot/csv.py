"""Reads COPY's CSV as typed Arrow batches."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import numpy as np
import pyarrow as pa
from pyarrow import csv

from airflow_provider_pgrepl.errors import SnapshotError, ValueRangeError, one_line
from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions

BLOCK_BYTES = 2 << 20
_NEWLINES_TRIED = 64
_NEWLINE, _QUOTE = b'\n"'
_COLUMN_OF_ERROR = re.compile(r"In CSV column #(\d+)")


class CsvTypeError(Exception):
    """pyarrow's CSV reader cannot read a value as the column's type. Reading the column as text succeeds, or
    raises an error that names the column."""


def read_csv(
    stream: BinaryIO,
    relation: Relation,
    options: TableOptions,
    *,
    block_bytes: int = BLOCK_BYTES,
    as_text: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of `COPY … TO STDOUT (FORMAT csv)` in the types of the lake. The stream has the columns
    of `values.copied_part`, in its order.

    Fast if pyarrow's CSV reader can convert the values itself. With `as_text`, all values go through the
    columns' `parse`. Raises CsvTypeError (never with `as_text`), ValueRangeError with the column's name, or
    SnapshotError if the bytes are not such a CSV. No error contains a value.
    """
    typed = values.typed_columns(relation, options)
    types = {
        column.name: (None if as_text else column.csv_type) or pa.string()
        for column in typed
        if column.index is not None
    }
    for batch in _batches(stream, values.copied_part(relation, options), types, block_bytes, as_text=as_text):
        yield _type(batch, typed)


def read_texts(
    stream: BinaryIO, relation: Relation, options: TableOptions, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.RecordBatch]:
    """Yield the same rows with text values. Raises what `read_csv` does with `as_text`."""
    relation = values.copied_part(relation, options)
    types = {column.name: pa.string() for column in relation.columns}
    yield from _batches(stream, relation, types, block_bytes, as_text=True)


def _batches(
    stream: BinaryIO,
    relation: Relation,
    types: dict[str, pa.DataType],
    block_bytes: int,
    *,
    as_text: bool,
) -> Iterator[pa.RecordBatch]:
    """Yield the rows with those of the relation's columns that have a type in `types`."""
    names = [column.name for column in relation.columns]
    finding: Exception | None = None
    for rows in whole_rows(stream, block_bytes):
        if not names:
            # A row of a table without columns is an empty line.
            yield pa.RecordBatch.from_struct_array(pa.nulls(len(rows), pa.struct([])))
            continue
        try:
            table = _read(rows, names, types)
        except pa.ArrowInvalid as error:
            # Arrow's message may contain the value, so neither it nor the exception as a cause may be passed
            # on.
            finding = _finding(str(error), relation, as_text=as_text)
        if finding:
            raise finding
        yield from table.to_batches()


def whole_rows(stream: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """Yield the stream in blocks of about `block_bytes` that end at the end of a row. A longer row is one
    block.

    pyarrow's streaming reader would do this in a thread of its own. But destroying that reader after an error
    waits for the thread while holding the GIL, which the thread needs to read from a Python stream.
    """
    rest, wanted, quotes = b"", block_bytes, 0
    while fresh := stream.read(wanted):
        # The rest contains no end of a row, so search only the new bytes, however long the row is.
        end = _end_of_rows(fresh, quotes)
        quotes = quotes + fresh.count(b'"') if end == 0 else fresh.count(b'"', end)
        if end:
            yield rest + fresh[:end]
            rest = fresh[end:]
        else:
            rest += fresh
        # Read twice as much each time while a row continues, so that its bytes are not copied too often.
        wanted = max(block_bytes, len(rest))
    if rest:
        yield rest


def _end_of_rows(block: bytes, quotes_before: int) -> int:
    """Return the offset after the last row that ends in the block, 0 if none does.

    A newline ends a row if the number of quotes before it is even: a quote within a value is written twice.
    """
    end = len(block)
    quotes = quotes_before + block.count(b'"')
    for _ in range(_NEWLINES_TRIED):
        newline = block.rfind(b"\n", 0, end)
        if newline < 0:
            return 0
        quotes -= block.count(b'"', newline, end)
        if quotes % 2 == 0:
            return newline + 1
        # This newline is within quotes, and so is everything back to the previous quote.
        end = block.rfind(b'"', 0, newline) + 1
    return _end_of_rows_among_many(block, quotes_before)


def _end_of_rows_among_many(block: bytes, quotes_before: int) -> int:
    """Return the same for a long value with many quotes and newlines, by examining all of them at once."""
    characters = np.frombuffer(block, np.uint8)
    newlines = np.flatnonzero(characters == _NEWLINE)
    quotes = np.searchsorted(np.flatnonzero(characters == _QUOTE), newlines) + quotes_before
    ends = newlines[quotes % 2 == 0]
    return int(ends[-1]) + 1 if len(ends) else 0


def _read(rows: bytes, names: list[str], types: dict[str, pa.DataType]) -> pa.Table:
    if rows.startswith(BOM_UTF8):
        # pyarrow drops a byte order mark at the start. Here it is the beginning of a row's text, so add
        # another one.
        rows = BOM_UTF8 + rows
    return csv.read_csv(
        pa.BufferReader(rows),
        read_options=csv.ReadOptions(column_names=names, block_size=len(rows) + 1, use_threads=False),
        # COPY writes NULL of a one-column table as an empty line.
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=types,
            include_columns=list(types),
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
        ),
    )


def _type(batch: pa.RecordBatch, typed: Iterable[values.TypedColumn]) -> pa.RecordBatch:
    """Convert the columns to their lake types. Columns that already have their type are kept."""
    columns = {column.name: _typed(batch, column) for column in typed}
    if not columns:
        return batch
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _typed(batch: pa.RecordBatch, column: values.TypedColumn) -> pa.Array:
    if column.index is None:
        return pa.nulls(batch.num_rows, column.lake_type)
    texts = batch.column(column.name)
    return texts if texts.type == column.lake_type else column.parse(texts)


def _finding(message: str, relation: Relation, *, as_text: bool) -> Exception:
    """Return the error for Arrow's message, without the value that the message may contain."""
    if not as_text:
        return CsvTypeError()
    place = _COLUMN_OF_ERROR.match(message)
    if place and int(place[1]) < len(relation.columns):
        column = relation.columns[int(place[1])]
        return ValueRangeError(
            f'column "{one_line(column.name)}" of {relation.table} ({one_line(column.type_name)}) holds a'
            " text that is not UTF-8",
            "fix the value at the source",
        )
    return SnapshotError(f"the copy of {relation.table} is not a CSV of its {len(relation.columns)} columns")
