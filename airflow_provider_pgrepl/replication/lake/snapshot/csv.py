"""COPY's CSV into typed Arrow batches."""

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
from airflow_provider_pgrepl.replication.settings.tables import TableChoices

BLOCK_BYTES = 2 << 20
_NEWLINES_TRIED = 64
_NEWLINE, _QUOTE = b'\n"'
_COLUMN_OF_ERROR = re.compile(r"In CSV column #(\d+)")


class OddValueError(Exception):
    """The CSV reader's own types do not take some value; reading as text does, or names the column."""


def read_csv(
    stream: BinaryIO,
    relation: Relation,
    choices: TableChoices,
    *,
    block_bytes: int = BLOCK_BYTES,
    as_text: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The rows of `COPY … TO STDOUT (FORMAT csv)` over `values.copied_part`'s columns, in its order, as lake
    types.

    Fast when pyarrow's CSV reader can type the values itself; with `as_text` all go through `values.parse`.
    Raises OddValueError (never with `as_text`), ValueRangeError naming the column, or SnapshotError when the
    bytes are not such a CSV. No error carries a value.
    """
    typed = values.typed_columns(relation, choices)
    types = {
        column.name: (None if as_text else column.csv_type) or pa.string()
        for column in typed
        if column.index is not None
    }
    for batch in _batches(stream, values.copied_part(relation, choices), types, block_bytes, as_text=as_text):
        yield _type(batch, typed)


def read_texts(
    stream: BinaryIO, relation: Relation, choices: TableChoices, *, block_bytes: int = BLOCK_BYTES
) -> Iterator[pa.RecordBatch]:
    """The same rows as the texts that they are. Raises as `read_csv` with `as_text`."""
    relation = values.copied_part(relation, choices)
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
    """Of the relation's columns those that have a type."""
    names = [column.name for column in relation.columns]
    finding: Exception | None = None
    for rows in whole_rows(stream, block_bytes):
        if not names:
            # Of a table without columns each row is an empty line.
            yield pa.RecordBatch.from_struct_array(pa.nulls(len(rows), pa.struct([])))
            continue
        try:
            table = _read(rows, names, types)
        except pa.ArrowInvalid as error:
            # Arrow's message holds the value: nothing of it may go on, not even as a cause.
            finding = _finding(str(error), relation, as_text=as_text)
        if finding:
            raise finding
        yield from table.to_batches()


def whole_rows(stream: BinaryIO, block_bytes: int) -> Iterator[bytes]:
    """The stream in pieces of about `block_bytes` that end where a row ends; a longer row is one piece.

    pyarrow's streaming reader would do this in a thread of its own, but destroying it after an error waits
    for that thread while holding the lock which the thread needs to read from a Python stream.
    """
    rest, wanted, quotes = b"", block_bytes, 0
    while fresh := stream.read(wanted):
        # What was left holds no end of a row, so only the new bytes are searched, however long the row is.
        end = _end_of_rows(fresh, quotes)
        quotes = quotes + fresh.count(b'"') if end == 0 else fresh.count(b'"', end)
        if end:
            yield rest + fresh[:end]
            rest = fresh[end:]
        else:
            rest += fresh
        # A row that goes on takes twice as much each time, so that it is not copied too often.
        wanted = max(block_bytes, len(rest))
    if rest:
        yield rest


def _end_of_rows(block: bytes, quotes_before: int) -> int:
    """The end of the last row that ends in the block; 0 when none does.

    A newline ends a row when an even number of quotes is before it (a quote within a value is written twice).
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
        # Within quotes, and so is all back to the quote before.
        end = block.rfind(b'"', 0, newline) + 1
    return _end_of_rows_among_many(block, quotes_before)


def _end_of_rows_among_many(block: bytes, quotes_before: int) -> int:
    """The same for a long value full of quotes and newlines, all of which must be looked at."""
    characters = np.frombuffer(block, np.uint8)
    newlines = np.flatnonzero(characters == _NEWLINE)
    quotes = np.searchsorted(np.flatnonzero(characters == _QUOTE), newlines) + quotes_before
    ends = newlines[quotes % 2 == 0]
    return int(ends[-1]) + 1 if len(ends) else 0


def _read(rows: bytes, names: list[str], types: dict[str, pa.DataType]) -> pa.Table:
    if rows.startswith(BOM_UTF8):
        # pyarrow drops a byte order mark at the start, which here is the beginning of a row's text.
        rows = BOM_UTF8 + rows
    return csv.read_csv(
        pa.BufferReader(rows),
        read_options=csv.ReadOptions(column_names=names, block_size=len(rows) + 1, use_threads=False),
        # A one-column table writes NULL as an empty line.
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
    """Parse the columns that were read as text and are not."""
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
    """What Arrow's message says, without the value that it may hold."""
    if not as_text:
        return OddValueError()
    place = _COLUMN_OF_ERROR.match(message)
    if place and int(place[1]) < len(relation.columns):
        column = relation.columns[int(place[1])]
        return ValueRangeError(
            f'column "{one_line(column.name)}" of {relation.table} ({one_line(column.type_name)}) holds a'
            " text that is not UTF-8",
            "mend the value at the source",
        )
    return SnapshotError(f"the copy of {relation.table} is not a CSV of its {len(relation.columns)} columns")
