"""The comparison by text: hashes of the texts of both sides.

The server hashes the texts that it writes, in the tasks' queries. For the lake, its values are written as
texts again (`values/text_output.py`), without the code that parsed them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from airflow_provider_pgrepl.errors import SourceError, TableError
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, open_copy
from airflow_provider_pgrepl.replication.source.copy.text_hashes import (
    HASHED_TOGETHER,
    BucketSql,
    TextHashes,
    hash_of_server,
    is_utf8,
)
from airflow_provider_pgrepl.replication.values import copied_part, typed_columns
from airflow_provider_pgrepl.replication.values.text_output import texts_of, unwritable

from . import text_kernels
from .buckets import K1, K2, R1, R2, BucketSums, Collection, RowShape, column_hash, key_value
from .comparison import NotCompared, SourceReading
from .row_hashes import Hashes, RowHashes

_PROBE = "the text that is hashed to compare both implementations"
_BITS = 64
_HALF = np.uint64(32)


@dataclass(frozen=True)
class TextShape(RowShape):
    """The columns of a table that are compared by their texts, and its key.

    `types`: the columns as the source has them, in the order of `columns`. Hashes have 64 bits: only the
    first half of the seed is used, and the second half of a key's hash is part of the first.
    """

    types: tuple[Column, ...] = ()
    as_hex: bool = False

    def hash_rows(self, rows: pa.Table | pa.RecordBatch) -> tuple[RowHashes, RowHashes]:
        """Return the hashes of keys and of whole rows."""
        texts = {name: self._texts(rows, name) for name in self.columns}
        whole = self._of_columns([texts[name] for name in self.columns], rows.num_rows)
        keys = self._of_columns([texts[name] for name in self.keys], rows.num_rows) if self.keys else whole
        return RowHashes(keys, keys >> _HALF), RowHashes(whole, np.zeros(len(whole), np.uint64))

    def hash_column(self, rows: pa.Table | pa.RecordBatch, name: str) -> Hashes:
        return self._of_columns([self._texts(rows, name)], rows.num_rows)

    @property
    def signed_seed(self) -> int:
        return int(np.uint64(self.seed[0]).view(np.int64))

    def _texts(self, rows: pa.Table | pa.RecordBatch, name: str) -> pa.Array:
        values = rows.column(name)
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        texts = texts_of(values, self.types[self.columns.index(name)].pg_type)
        if not self.as_hex:
            return texts
        digits = [None if text is None else text.encode().hex() for text in texts.to_pylist()]
        return pa.array(digits, pa.large_string())

    def _of_columns(self, columns: list[pa.Array], rows: int) -> Hashes:
        found = np.full(rows, self.seed[0], np.uint64)
        for first in range(0, len(columns), HASHED_TOGETHER):
            group = np.full(rows, self.seed[0], np.uint64)
            for texts in columns[first : first + HASHED_TOGETHER]:
                _add(texts, group)
            if first:
                _add(pa.array(group.view(np.int64)).cast(pa.large_string()), found)
            else:
                found = group
        return found


def _add(texts: pa.Array, hashes: Hashes) -> None:
    """Replace the hash of each row by that of its text, with the hash as seed."""
    if not len(texts):
        return
    _, places, data = texts.buffers()
    offsets = np.frombuffer(places, np.int64)[texts.offset : texts.offset + len(texts) + 1]
    content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
    valid = np.ascontiguousarray(texts.is_valid().to_numpy(zero_copy_only=False))
    text_kernels.add_texts(offsets, content, valid, hashes)


def text_shape_of(source: Connection, relation: Relation, options: TableOptions) -> TextShape:
    """Return the columns of a table that are compared by their texts, and its key, with a new seed.

    Raises TableError if the texts of the key are not kept, SourceError if the server's hashes are not those
    of this package.
    """
    left_out = {part.part for part in parts_without_text(relation, options)}
    if any(_part(column) in left_out for column in relation.key_columns):
        raise TableError(
            f"{relation.table}: the lake does not keep the texts of its key",
            "verify it without --check text",
        )
    compared = [
        typed.column
        for typed in typed_columns(relation, options)
        if typed.index is not None and _part(typed.column) not in left_out
    ]
    shape = TextShape(
        tuple(column.name for column in compared),
        tuple(column.name for column in relation.key_columns),
        (secrets.randbits(_BITS), 0),
        tuple(compared),
        not is_utf8(source),
    )
    _check_hash(source, shape)
    return shape


def parts_without_text(relation: Relation, options: TableOptions) -> list[NotCompared]:
    """Return the columns of a table whose values in the lake do not have the texts of the source."""
    found = []
    for typed in typed_columns(relation, options):
        choice = options.column(typed.name, is_key=typed.column.is_key)
        if typed.index is not None and (reason := unwritable(typed.column.pg_type, choice)):
            found.append(NotCompared(_part(typed.column), reason))
    return found


def _part(column: Column) -> str:
    return f"column {column.name}"


def _check_hash(source: Connection, shape: TextShape) -> None:
    ours = np.array([shape.seed[0]], np.uint64)
    _add(pa.array([_PROBE], pa.large_string()), ours)
    if hash_of_server(source, _PROBE, shape.signed_seed) != int(ours.view(np.int64)[0]):
        raise SourceError(
            "the server's hashtextextended is not that of PostgreSQL on a little-endian host",
            "verify without --check text",
        )


class TextReading(SourceReading):
    """The reading of one table's ranges as hashes that the server computes."""

    def _collect(self, copy_range: CopyRange) -> Any:
        collection = self.collection
        assert isinstance(collection, Collection)
        assert isinstance(collection.shape, TextShape)
        # A partitioned table without partitions has one range, without columns.
        if not copy_range.leaf_oid:
            return collection.merge([])
        query, buckets = self._hashes(collection.shape), _bucket_sql(collection)
        if collection.wanted is None:
            counted = copy_range.computing(lambda select: query.sums(select, buckets))
            return _sums(self._read(counted, ["b", "count", "sum"], {"sum": pa.string()}), collection)
        listed = copy_range.computing(
            lambda select: query.lists(select, buckets, shows_keys=collection.shows_keys)
        )
        hashes = [K1, R1, *(column_hash(number) for number in range(len(query.hashed)))]
        keys = [key_value(number) for number in range(len(query.keys))] if collection.shows_keys else []
        return _listed(self._read(listed, [*hashes, *keys], dict.fromkeys(keys, pa.string())), keys)

    def _hashes(self, shape: TextShape) -> TextHashes:
        columns = [column.name for column in copied_part(self.relation, self.options).columns]
        return TextHashes(columns, shape.columns, shape.keys, shape.signed_seed, shape.as_hex)

    def _read(self, copy_range: CopyRange, names: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        with open_copy(self.dsn, self.snapshot, copy_range) as stream:
            return self._table(stream.read(), names, types)

    def _table(self, data: bytes, names: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        types = {**dict.fromkeys(names, pa.int64()), **types}
        schema = pa.schema(list(types.items()))
        if not data:
            return schema.empty_table()
        with suppress(pa.ArrowInvalid):
            return csv.read_csv(
                pa.py_buffer(data),
                csv.ReadOptions(column_names=names, block_size=len(data) + 1),
                csv.ParseOptions(newlines_in_values=True),
                csv.ConvertOptions(column_types=types, strings_can_be_null=False),
            )
        # Without the cause, whose text quotes the line.
        raise SourceError(f"{self.relation.table}: the server's hashes could not be read")


def _bucket_sql(collection: Collection) -> BucketSql:
    buckets, wanted = collection.buckets, collection.wanted
    ranges = len(buckets.slots)
    is_plain = np.array_equal(buckets.slots, np.arange(ranges))
    listed = None if wanted is None or wanted.all() else np.flatnonzero(wanted).tolist()
    return BucketSql(ranges, None if is_plain else buckets.slots.tolist(), buckets.sub_buckets, listed)


def _sums(rows: pa.Table, collection: Collection) -> BucketSums:
    found = BucketSums.zero(collection.buckets.count)
    numbers = rows["b"].to_numpy()
    found.counts[numbers] = rows["count"].to_numpy()
    found.s1[numbers] = np.fromiter(_modulo(rows["sum"].to_pylist()), np.uint64, len(numbers))
    return found


def _modulo(sums: Iterable[str]) -> Iterable[int]:
    return (int(text) % (1 << _BITS) for text in sums)


def _listed(rows: pa.Table, keys: list[str]) -> pa.Table | None:
    if not rows.num_rows:
        return None
    names = [name for name in rows.column_names if name not in keys]
    columns: dict[str, Any] = {name: pa.array(rows[name].to_numpy().view(np.uint64)) for name in names}
    columns[K2] = pa.array(rows[K1].to_numpy().view(np.uint64) >> _HALF)
    columns[R2] = pa.array(np.zeros(rows.num_rows, np.uint64))
    return pa.table({**columns, **{name: rows[name] for name in keys}})
