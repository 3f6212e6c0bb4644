"""Exact equality of rows, for every Arrow type that a lake column can have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

Ints = np.ndarray[Any, np.dtype[np.int64]]

_BITS = {pa.float16(): pa.int16(), pa.float32(): pa.int32(), pa.float64(): pa.int64()}


def row_codes(columns: Iterable[pa.Array], rows: int) -> Ints:
    """Return a code, from 0, for each row of these columns. Equal rows have the same code.

    NULL equals NULL and NaN equals NaN; -0.0 differs from 0.0. Codes can be compared only among rows of the
    same call.
    """
    codes, count = np.zeros(rows, np.int64), 1
    for column in columns:
        own = _value_codes(column)
        if count > 1:
            combined = pa.array(codes * (int(own.max(initial=0)) + 1) + own).dictionary_encode()
            codes, count = combined.indices.to_numpy().astype(np.int64), len(combined.dictionary)
        else:
            codes, count = own, int(own.max(initial=-1)) + 1
    return codes


def match_rows(rows: pa.Table, wanted: pa.Table) -> Ints:
    """Return, for each row, the number of the row in `wanted` that it equals; -1 if none.

    The rows of `wanted` must differ from each other.
    """
    columns = (
        pa.chunked_array([*rows[name].chunks, *wanted[name].cast(rows[name].type).chunks]).combine_chunks()
        for name in wanted.schema.names
    )
    codes = row_codes(columns, len(rows) + len(wanted))
    number = np.full(int(codes.max(initial=-1)) + 1, -1, np.int64)
    number[codes[len(rows) :]] = np.arange(len(wanted))
    return number[codes[: len(rows)]]


def _value_codes(values: pa.Array) -> Ints:
    kind = values.type
    if pa.types.is_struct(kind):
        fields = [values.is_null(), *(_under(values, index) for index in range(kind.num_fields))]
        return row_codes(fields, len(values))
    if pa.types.is_map(kind):
        entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
        return _list_codes(values, pa.ListArray.from_arrays(values.offsets, entries))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _list_codes(values, values)
    if pa.types.is_fixed_size_list(kind):
        return _value_codes(values.cast(pa.list_(kind.value_type)))
    if pa.types.is_floating(kind):
        plain = pc.if_else(pc.is_nan(values), pa.scalar(float("nan"), kind), values)
        values = plain.view(_BITS[kind])
    encoded = values.dictionary_encode(null_encoding="encode")
    return np.asarray(encoded.indices.to_numpy(), np.int64)


def _under(values: pa.StructArray, index: int) -> pa.Array:
    """Return a field of a struct, null where the struct is null, whatever value the field's own array has."""
    return pc.struct_field(values, index)


def _list_codes(values: pa.Array, lists: pa.Array) -> Ints:
    """Return codes of lists. Each list is compared by the bytes of the codes of its elements."""
    offsets = lists.offsets.to_numpy().astype(np.int64)
    first, last = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, 0)
    elements = _value_codes(lists.values.slice(first, last - first))
    places = (offsets - first) * elements.itemsize
    texts = pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(values), [None, pa.py_buffer(places), pa.py_buffer(elements)]
    )
    return row_codes([values.is_null(), pc.if_else(values.is_valid(), texts, None)], len(values))
