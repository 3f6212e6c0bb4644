"""The texts that a text holds: an array's elements, a record's fields, a range's bounds, a hstore's pairs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.replication.values import kernels
from airflow_provider_pgrepl.replication.values.parser import Unholdable, not_output_of_type

_INT32_MAX = 2**31 - 1
_OTHER_SHAPE = (
    "give the column in types the lake type array(n), if all its arrays have n dimensions that begin at 1, or"
    f" else string; then {hints.RESNAPSHOT}"
)
_FINDINGS = {
    kernels.NESTED: ("an array of more dimensions", _OTHER_SHAPE),
    kernels.NOT_NESTED: ("an array of fewer dimensions", _OTHER_SHAPE),
    kernels.LOWER_BOUND: ("an array whose first index is not 1", _OTHER_SHAPE),
    kernels.WRONG_COUNT: (
        "a composite with another number of attributes",
        f"its type was altered: {hints.RESNAPSHOT}",
    ),
}


@dataclass(frozen=True)
class Parts:
    """`texts` of all rows one after the other, those of row i from `starts[i]` to `starts[i + 1]`.

    (For pairs `starts` counts pairs.) A row that is null has none; a record's fields are then all null.
    """

    starts: pa.Array
    texts: pa.Array


def split_array(texts: pa.Array, delimiter: str = ",", brackets: str = "{}") -> Parts:
    """Elements, unquoted. Raises Unholdable for arrays of more dimensions, or with lower bounds."""
    opening, closing = brackets.encode()
    between = ord(delimiter)
    return _split(
        texts,
        lambda *inputs: kernels.split_array(*inputs[:3], between, opening, closing, *inputs[3:]),
        lambda data: _count(data, between) + len(texts),
    )


def split_rows(texts: pa.Array, delimiter: str) -> Parts:
    """The outermost rows of arrays of more than one dimension, each an array's text. Raises Unholdable."""
    return _split_whole(texts, ord(delimiter), is_multirange=False)


def split_multirange(texts: pa.Array) -> Parts:
    """Ranges as they are written."""
    return _split_whole(texts, ord(","), is_multirange=True)


def _split_whole(texts: pa.Array, between: int, *, is_multirange: bool) -> Parts:
    return _split(
        texts,
        lambda *inputs: kernels.split_whole(*inputs[:3], between, is_multirange, *inputs[3:]),
        lambda data: _count(data, between) + len(texts),
    )


def split_record(texts: pa.Array, width: int, *, is_range: bool = False) -> list[pa.Array]:
    """The texts of each field, or of a range's two bounds."""
    parts = _split(
        texts,
        lambda *inputs: kernels.split_record(*inputs[:3], width, is_range, *inputs[3:]),
        lambda _: width * len(texts),
    )
    return _by_turns(parts.texts, width)


def split_pairs(texts: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Where each row's pairs start, all keys, all values."""
    parts = _split(texts, kernels.split_pairs, lambda data: 2 * _count(data, ord(">")))
    keys, values = _by_turns(parts.texts, 2)
    return parts.starts, keys, values


def _by_turns(texts: pa.Array, width: int) -> list[pa.Array]:
    if width == 1:
        return [texts]
    return [texts.take(pa.array(np.arange(turn, len(texts), width))) for turn in range(width)]


def _count(data: NDArray[np.uint8], byte: int) -> int:
    return int(np.count_nonzero(data == byte))


def _split(texts: pa.Array, kernel: Callable[..., Any], most: Callable[[NDArray[np.uint8]], int]) -> Parts:
    """Run a kernel; `most` says how many parts there can be at most. Raises Unholdable."""
    places, data = _places_and_data(texts)
    valid = texts.is_valid().to_numpy(zero_copy_only=False)
    starts = np.zeros(len(texts) + 1, np.int64)
    capacity = most(data)
    ends, nulls = np.empty(capacity, np.int64), np.zeros(capacity, np.bool_)
    out = np.empty(len(data), np.uint8)
    status, parts, filled = kernel(places, data, valid, starts, ends, nulls, out)
    if status == kernels.MALFORMED:
        raise not_output_of_type()
    if status != kernels.OK:
        raise Unholdable(*_FINDINGS[status])
    return Parts(pa.array(starts).cast(pa.int32()), _strings(ends[:parts], nulls[:parts], out[:filled]))


def _places_and_data(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Where each text begins and ends, and the bytes of all."""
    width = np.int64 if pa.types.is_large_string(texts.type) else np.int32
    _, offsets, bytes_ = texts.buffers()
    if len(texts) == 0 or offsets is None:
        return np.zeros(len(texts) + 1, np.int64), np.frombuffer(b"", np.uint8)
    places = np.frombuffer(offsets, width, len(texts) + 1, texts.offset * np.dtype(width).itemsize)
    first, last = int(places[0]), int(places[-1])
    data = np.frombuffer(bytes_, np.uint8, last - first, first) if bytes_ else np.frombuffer(b"", np.uint8)
    return places.astype(np.int64) - first, data


def _strings(ends: NDArray[np.int64], nulls: NDArray[np.bool_], data: NDArray[np.uint8]) -> pa.Array:
    is_large = len(data) > _INT32_MAX
    offsets = np.zeros(len(ends) + 1, np.int64 if is_large else np.int32)
    offsets[1:] = ends
    validity = pa.py_buffer(np.packbits(~nulls, bitorder="little")) if nulls.any() else None
    return pa.Array.from_buffers(
        pa.large_string() if is_large else pa.string(),
        len(ends),
        [validity, pa.py_buffer(offsets), pa.py_buffer(data)],
    )
