"""The texts that a text holds: an array's elements, a record's fields, a range's bounds, a hstore's pairs."""

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
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values import kernels
from airflow_provider_pgrepl.replication.values.parser import (
    Parser,
    ParserOf,
    Text,
    Unholdable,
    not_output_of_type,
)

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


@dataclass(frozen=True)
class Array:
    """An array as a list of what `element` makes of its elements.

    A list has neither a first index nor a fixed number of dimensions, which belong to an array's value, not
    to its type. So an array that does not begin at 1, or has other dimensions than the column is to have, is
    refused. `of_rows`: the elements are themselves rows of an array of more than one dimension.
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
    """Lists that begin at `starts`, null where the texts are."""
    return pa.ListArray.from_arrays(starts, values, mask=texts.is_null() if texts.null_count else None)


def array(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Parser:
    """A list, or by the column's choice lists of lists, the outer of which is what an empty array becomes."""
    element = pg_type.only_part
    parser: Parser = Array(parser_of(element, replace(choice, lake_type=None)), element.delimiter)
    for _ in range(1, choice.lake_type.dimensions if choice.lake_type else 1):
        parser = Array(parser, element.delimiter, of_rows=True)
    return parser


@dataclass(frozen=True)
class Composite:
    """A composite as a struct with its attributes, in their order."""

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


def composite(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Parser:
    """The exact text where a struct cannot be: without attributes, or when names differ only in case."""
    names = {name.casefold() for name, _ in pg_type.parts}
    if not names or len(names) < len(pg_type.parts):
        return Text()
    inner = replace(choice, lake_type=None)
    return Composite(tuple((name, parser_of(part, inner)) for name, part in pg_type.parts))


@dataclass(frozen=True)
class Range:
    """A range as a struct: `lower` and `upper` (null: unbounded), whether each belongs to it, is it empty.

    An empty range has no bounds.
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
        except Unholdable as unholdable:
            reason = f"{unholdable.reason}, as the bound of a range"
        raise Unholdable(reason, f"give the column the lake type string in types; then {errors.RESNAPSHOT}")


@dataclass(frozen=True)
class Multirange:
    """A multirange as the list of its ranges; an empty one has none."""

    range: Range
    csv_type: pa.DataType | None = None

    @property
    def lake_type(self) -> pa.DataType:
        return pa.list_(self.range.lake_type)

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_multirange(texts)
        return list_array(parts.starts, self.range.parse(parts.texts), texts)


def range_(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Range:
    """The column's choices hold for its bounds, but a bound never becomes null: that says unbounded."""
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


def multirange(pg_type: PgType, choice: ColumnChoice, parser_of: ParserOf) -> Multirange:
    """A multirange of any type of range."""
    return Multirange(range_(pg_type.only_part, choice, parser_of))
