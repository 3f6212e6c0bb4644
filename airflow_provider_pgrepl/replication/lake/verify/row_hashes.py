"""Hashes of the rows of Arrow tables, from the values of their columns in the types of the lake.

Equal rows have equal hashes: NULL equals NULL and NaN equals NaN, -0.0 differs from 0.0. Two different rows
have equal hashes by chance only. The seed is random, and is not in the source, so that no user of the source
can make rows that collide.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from . import kernels

Hashes = np.ndarray[Any, np.dtype[np.uint64]]
_BITS = {pa.float32(): np.uint32, pa.float64(): np.uint64}


@dataclass
class RowHashes:
    """The 128-bit hashes of some rows, as two halves."""

    h1: Hashes
    h2: Hashes

    def __len__(self) -> int:
        return len(self.h1)

    @classmethod
    def seeded(cls, rows: int, seed: tuple[int, int]) -> RowHashes:
        """Return the hashes of rows without a column."""
        return cls(np.full(rows, seed[0], np.uint64), np.full(rows, seed[1], np.uint64))

    def add(self, values: pa.Array) -> None:
        """Add a column to the hashes."""
        kind = values.type
        if pa.types.is_struct(kind):
            self._add_lists(_one_each(len(values)), _of_struct(values), values)
        elif pa.types.is_map(kind):
            entries = pa.StructArray.from_arrays([values.keys, values.items], ["key", "value"])
            self._add_elements(values, entries)
        elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
            self._add_elements(values, values.values)
        elif pa.types.is_fixed_size_list(kind):
            self.add(values.cast(pa.list_(kind.value_type)))
        elif pa.types.is_decimal(kind):
            kernels.add_pairs(_words_of_decimals(values), _valid(values), self.h1, self.h2)
        elif _is_sized(kind):
            kernels.add_words(_words(values), _valid(values), self.h1, self.h2)
        else:
            self._add_bytes(values.cast(pa.large_binary()))

    def _add_bytes(self, values: pa.Array) -> None:
        _, places, data = values.buffers()
        offsets = np.frombuffer(places, np.int64)[values.offset : values.offset + len(values) + 1]
        if not len(values):
            offsets = np.zeros(1, np.int64)
        content = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        kernels.add_bytes(offsets, content, _valid(values), self.h1, self.h2)

    def _add_elements(self, values: pa.Array, elements: pa.Array) -> None:
        places = values.offsets.to_numpy().astype(np.int64)
        first, last = (int(places[0]), int(places[-1])) if len(values) else (0, 0)
        places = places - first if len(values) else np.zeros(1, np.int64)
        self._add_lists(places, hashes_of([elements.slice(first, last - first)], last - first), values)

    def _add_lists(self, places: np.ndarray[Any, Any], elements: RowHashes, values: pa.Array) -> None:
        kernels.add_lists(places, elements.h1, elements.h2, _valid(values), self.h1, self.h2)


def hashes_of(columns: Iterable[pa.Array], rows: int, seed: tuple[int, int] = (0, 0)) -> RowHashes:
    """Return the hashes of rows with these columns."""
    hashes = RowHashes.seeded(rows, seed)
    for column in columns:
        hashes.add(column)
    return hashes


def _one_each(rows: int) -> np.ndarray[Any, Any]:
    return np.arange(rows + 1, dtype=np.int64)


def _of_struct(values: pa.StructArray) -> RowHashes:
    return hashes_of((pc.struct_field(values, at) for at in range(values.type.num_fields)), len(values))


def _valid(values: pa.Array) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(values.is_valid().to_numpy(zero_copy_only=False))


def _is_sized(kind: pa.DataType) -> bool:
    """Return True if a value of the type is one number of at most 64 bits."""
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return is_number or (pa.types.is_temporal(kind) and not pa.types.is_interval(kind))


def _words(values: pa.Array) -> Hashes:
    kind = values.type
    if pa.types.is_float16(kind):
        return _words(values.cast(pa.float32()))
    if pa.types.is_floating(kind):
        numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
        plain = np.where(np.isnan(numbers), numbers.dtype.type(np.nan), numbers)
        return np.ascontiguousarray(plain).view(_BITS[kind]).astype(np.uint64)
    if pa.types.is_temporal(kind):
        values = values.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    numbers = values.fill_null(0).to_numpy(zero_copy_only=False)
    return (
        np.ascontiguousarray(numbers)
        .astype(np.int64 if numbers.dtype.kind == "i" else np.uint64)
        .view(np.uint64)
    )


def _words_of_decimals(values: pa.Array) -> Hashes:
    plain = values.cast(pa.decimal128(38, values.type.scale))
    words = np.frombuffer(plain.buffers()[1], np.uint64)
    return words[2 * plain.offset : 2 * (plain.offset + len(plain))]
