"""Parsers of types with components (arrays, composites, ranges, hstore, vectors), and splitting of texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions

from . import kernels
from .parser import Parser, ParserOf, Text, UnsupportedValue, cast, not_output_of_type

_INT32_MAX = 2**31 - 1
_OTHER_SHAPE = (
    "give the column in types the lake type array(n), if all its arrays have n dimensions that begin at 1, or"
    f" else string; then {errors.RESNAPSHOT}"
)
_FINDINGS = {
    kernels.NESTED: ("an array of more dimensions", _OTHER_SHAPE),
    kernels.NOT_NESTED: ("an array of fewer dimensions", _OTHER_SHAPE),
    kernels.LOWER_BOUND: ("an array whose first index is not 1", _OTHER_SHAPE),
    kernels.WRONG_COUNT: (
        "a composite with another number of attributes",
        f"its type was altered: {errors.RESNAPSHOT}",
    ),
}
_EMPTY = "empty"


@dataclass(frozen=True)
class Parts:
    """The parts of all rows, one after the other in `texts`.

    The parts of row i are those from `starts[i]` to `starts[i + 1]`; for hstores, `starts` counts pairs. A
    null row has no parts, but a null record has all fields, as nulls.
    """

    starts: pa.Array
    texts: pa.Array


def split_array(texts: pa.Array, delimiter: str = ",", brackets: str = "{}") -> Parts:
    """Split arrays into unquoted elements.

    Raises UnsupportedValue for arrays of several dimensions, or with explicit lower bounds.
    """
    opening, closing = brackets.encode()
    between = ord(delimiter)
    return _split(
        texts,
        lambda *inputs: kernels.split_array(*inputs[:3], between, opening, closing, *inputs[3:]),
        lambda data: _count(data, between) + len(texts),
    )


def split_rows(texts: pa.Array, delimiter: str) -> Parts:
    """Split arrays of several dimensions into their outermost rows, as texts. Raises UnsupportedValue."""
    return _split_whole(texts, ord(delimiter), is_multirange=False)


def split_multirange(texts: pa.Array) -> Parts:
    """Split multiranges into the texts of their ranges. Raises UnsupportedValue."""
    return _split_whole(texts, ord(","), is_multirange=True)


def _split_whole(texts: pa.Array, between: int, *, is_multirange: bool) -> Parts:
    return _split(
        texts,
        lambda *inputs: kernels.split_whole(*inputs[:3], between, is_multirange, *inputs[3:]),
        lambda data: _count(data, between) + len(texts),
    )


def split_record(texts: pa.Array, width: int, *, is_range: bool = False) -> list[pa.Array]:
    """Split records into an array of texts for each field, ranges into 2 bounds. Raises UnsupportedValue."""
    parts = _split(
        texts,
        lambda *inputs: kernels.split_record(*inputs[:3], width, is_range, *inputs[3:]),
        lambda _: width * len(texts),
    )
    return _by_turns(parts.texts, width)


def split_pairs(texts: pa.Array) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Split hstores. Return each row's first pair number, all keys, all values. Raises UnsupportedValue."""
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
    """Run a kernel. `most`: returns the maximum number of parts. Raises UnsupportedValue."""
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
        raise UnsupportedValue(*_FINDINGS[status])
    return Parts(pa.array(starts).cast(pa.int32()), _strings(ends[:parts], nulls[:parts], out[:filled]))


def _places_and_data(texts: pa.Array) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Return the offsets of the texts, from 0, and the bytes of all texts."""
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


@dataclass(frozen=True)
class Array:
    """An array as a list of the values that `element` parses.

    In PostgreSQL, the lower bound and the number of dimensions belong to an array's value, not to its type. A
    list has no lower bound. Therefore `parse` raises UnsupportedValue for an array that does not begin at 1,
    or has another number of dimensions than the column.
    `of_rows`: True if the elements are rows of an array of several dimensions.
    """

    element: Parser
    delimiter: str = ","
    of_rows: bool = False
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.list_(self.element.lake_type)

    def parse(self, texts: pa.Array) -> pa.Array:
        split = split_rows if self.of_rows else split_array
        parts = split(texts, self.delimiter)
        return list_array(parts.starts, self.element.parse(parts.texts), texts)


def list_array(starts: pa.Array, values: pa.Array, texts: pa.Array) -> pa.Array:
    """Return lists whose values begin at `starts`; null if the text is null."""
    return pa.ListArray.from_arrays(starts, values, mask=texts.is_null() if texts.null_count else None)


def array(pg_type: PgType, choice: ColumnOptions, parser_of: ParserOf) -> Parser:
    """Return the parser of an array: a list, or nested lists if the settings have `array(n)`.

    An empty array becomes an empty outermost list.
    """
    element = pg_type.only_part
    parser: Parser = Array(parser_of(element, replace(choice, lake_type=None)), element.delimiter)
    for _ in range(1, choice.lake_type.dimensions if choice.lake_type else 1):
        parser = Array(parser, element.delimiter, of_rows=True)
    return parser


@dataclass(frozen=True)
class Composite:
    """A composite as a struct of its attributes, in their order."""

    attributes: tuple[tuple[str, Parser], ...]
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.struct([(name, parser.lake_type) for name, parser in self.attributes])

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_record(texts, len(self.attributes))
        values = [parser.parse(part) for (_, parser), part in zip(self.attributes, parts, strict=True)]
        return pa.StructArray.from_arrays(
            values,
            names=[name for name, _ in self.attributes],
            mask=texts.is_null() if texts.null_count else None,
        )


def composite(pg_type: PgType, choice: ColumnOptions, parser_of: ParserOf) -> Parser:
    """Return the parser of a composite: a struct, or the exact text if no struct is possible.

    A struct is not possible without attributes, or if attribute names differ only in case.
    """
    names = {name.casefold() for name, _ in pg_type.parts}
    if not names or len(names) < len(pg_type.parts):
        return Text()
    inner = replace(choice, lake_type=None)
    return Composite(tuple((name, parser_of(part, inner)) for name, part in pg_type.parts))


@dataclass(frozen=True)
class Range:
    """A range as a struct: `lower` and `upper` (null: unbounded), and whether each is inclusive; `empty`.

    The bounds of an empty range are null.
    """

    bound: Parser
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        bounds = [(name, self.bound.lake_type) for name in ("lower", "upper")]
        flags = [(name, pa.bool_()) for name in ("lower_inclusive", "upper_inclusive", "empty")]
        return pa.struct([*bounds, *flags])

    def parse(self, texts: pa.Array) -> pa.Array:
        empty = pc.equal(texts, pa.scalar(_EMPTY, texts.type))
        bounded = pc.if_else(empty, pa.scalar(None, texts.type), texts)
        lower, upper = (self._parse_bound(bound) for bound in split_record(bounded, 2, is_range=True))
        flags = [pc.starts_with(texts, "["), pc.ends_with(texts, "]"), empty]
        names = [field.name for field in self.lake_type]
        mask = texts.is_null() if texts.null_count else None
        return pa.StructArray.from_arrays([lower, upper, *flags], names=names, mask=mask)

    def _parse_bound(self, texts: pa.Array) -> pa.Array:
        try:
            return self.bound.parse(texts)
        except UnsupportedValue as unholdable:
            reason = f"{unholdable.reason}, as the bound of a range"
        raise UnsupportedValue(
            reason, f"give the column the lake type string in types; then {errors.RESNAPSHOT}"
        )


@dataclass(frozen=True)
class Multirange:
    """A multirange as a list of its ranges; an empty multirange is an empty list."""

    range: Range
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.list_(self.range.lake_type)

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_multirange(texts)
        return list_array(parts.starts, self.range.parse(parts.texts), texts)


def range_(pg_type: PgType, choice: ColumnOptions, parser_of: ParserOf) -> Range:
    """Return the parser of a range. The column's settings apply to its bounds.

    A bound never becomes null, because null means unbounded.
    """
    return Range(
        parser_of(
            pg_type.only_part,
            replace(
                choice,
                lake_type=None,
                infinity="error" if choice.infinity == "null" else choice.infinity,
                numeric_nan="error",
            ),
        )
    )


def multirange(pg_type: PgType, choice: ColumnOptions, parser_of: ParserOf) -> Multirange:
    """Return the parser of a multirange."""
    return Multirange(range_(pg_type.only_part, choice, parser_of))


class HStore:
    """hstore as a map of text. A value may be null, keys are unique, the order of pairs has no meaning."""

    lake_type: pa.DataType = pa.map_(pa.string(), pa.string())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        starts, keys, values = split_pairs(texts)
        return pa.MapArray.from_arrays(
            starts, keys, values, mask=texts.is_null() if texts.null_count else None
        )


def hstore(_: PgType, __: ColumnOptions) -> HStore:
    """Return the parser of the extension's type hstore."""
    return HStore()


class Vector:
    """Vectors as lists of 32-bit floats, which represent the 16-bit floats of halfvec exactly."""

    lake_type: pa.DataType = pa.list_(pa.float32())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_array(texts, brackets="[]")
        numbers = cast(parts.texts, pa.float32())
        if numbers is None or numbers.null_count:
            raise not_output_of_type()
        return list_array(parts.starts, numbers, texts)


def vector(_: PgType, __: ColumnOptions) -> Vector:
    """Return the parser of pgvector's vector and halfvec."""
    return Vector()
