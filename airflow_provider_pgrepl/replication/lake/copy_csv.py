"""COPY's CSV into typed Arrow batches."""

from __future__ import annotations

import io
import re
from codecs import BOM_UTF8
from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa
from pyarrow import csv

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError, ValueRangeError
from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Relation

BLOCK_BYTES = 4 << 20
_COLUMN_OF_ERROR = re.compile(r"In CSV column #(\d+)")


class RowTooLongError(Exception):
    """A row does not fit the block; the same bytes can be read with a larger one."""


class OddValueError(Exception):
    """The CSV reader's own types do not take some value; reading as text does, or names the column."""


def read_csv(
    stream: BinaryIO,
    relation: Relation,
    pipeline: Pipeline,
    *,
    block_bytes: int = BLOCK_BYTES,
    as_text: bool = False,
) -> Iterator[pa.RecordBatch]:
    """The rows of `COPY … TO STDOUT (FORMAT csv)` over the relation's columns, in its order, as lake types.

    Fast when pyarrow's CSV reader can type the values itself; with `as_text` all go through `values.parse`.
    Raises RowTooLongError, OddValueError (never with `as_text`), ValueRangeError naming the column, or
    SnapshotError when the bytes are not such a CSV. No error carries a value.
    """
    head = stream.read(block_bytes)
    if not head:
        return
    types = {
        column.name: (None if as_text else values.csv_type(column, pipeline)) or pa.string()
        for column in relation.columns
    }
    finding: PgReplError | Exception
    try:
        with _open(_Marked(head, stream), types, block_bytes) as reader:
            for batch in reader:
                yield _type(batch, relation, pipeline)
        return
    except pa.ArrowInvalid as error:
        # Arrow's message holds the value: nothing of it may go on, not even as a cause.
        finding = _finding(str(error), relation, as_text=as_text)
    raise finding


def _open(stream: BinaryIO, types: dict[str, pa.DataType], block_bytes: int) -> csv.CSVStreamingReader:
    return csv.open_csv(
        stream,
        read_options=csv.ReadOptions(column_names=list(types), block_size=block_bytes, use_threads=False),
        # A one-column table writes NULL as an empty line.
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        convert_options=csv.ConvertOptions(
            column_types=types,
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            null_values=[""],
            true_values=["t"],
            false_values=["f"],
        ),
    )


def _type(batch: pa.RecordBatch, relation: Relation, pipeline: Pipeline) -> pa.RecordBatch:
    """Parse the columns that were read as text and are not."""
    columns = [
        texts
        if texts.type == values.lake_type(column, pipeline)
        else values.parse(column, texts, pipeline, relation.table)
        for column, texts in zip(relation.columns, batch.columns, strict=True)
    ]
    return pa.RecordBatch.from_arrays(columns, names=[column.name for column in relation.columns])


def _finding(message: str, relation: Relation, *, as_text: bool) -> Exception:
    """What Arrow's message says, without the value that it may hold."""
    if "straddl" in message:
        return RowTooLongError()
    if not as_text:
        return OddValueError()
    place = _COLUMN_OF_ERROR.match(message)
    if place and int(place[1]) < len(relation.columns):
        column = relation.columns[int(place[1])]
        return ValueRangeError(
            f'column "{column.name}" of {relation.table} ({column.type_name}) holds a text that is not UTF-8',
            "the source database's encoding is SQL_ASCII: mend the value there",
        )
    return SnapshotError(f"the copy of {relation.table} is not a CSV of its {len(relation.columns)} columns")


class _Marked(io.RawIOBase):
    """A stream with a byte order mark of ours in front.

    pyarrow drops a mark at the very start, which may be the beginning of the first row's text.
    """

    def __init__(self, head: bytes, rest: BinaryIO) -> None:
        self._head = BOM_UTF8 + head
        self._rest = rest

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        if not self._head:
            return self._rest.read(size)
        if size < 0:
            size = len(self._head)
        piece, self._head = self._head[:size], self._head[size:]
        return piece
