"""The interface of a parser for a family of PostgreSQL types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions


class UnsupportedValue(Exception):  # noqa: N818 - a finding; callers raise ValueRangeError
    """The error that the lake type cannot hold a value. `reason`: the kind of value; `hint`: a remedy."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason, hint)
        self.reason = reason
        self.hint = hint


class Parser(Protocol):
    """The parser of one type's values for the lake.

    Its input is always the text that the type's output function returns under the pinned session settings;
    null is NULL.
    """

    @property
    def lake_type(self) -> pa.DataType:
        """The Arrow type of the lake column."""

    @property
    def csv_type(self) -> pa.DataType | None:
        """The type for pyarrow's CSV reader, if its values always equal those of `parse`; else None."""

    def parse(self, texts: pa.Array) -> pa.Array:
        """Convert a `string` or `large_string` array to `lake_type`, exactly. Raises UnsupportedValue."""


Family = Callable[[PgType, ColumnOptions], Parser]
"""Returns the parser of a type of the family, according to a pipeline's settings."""

ParserOf = Callable[[PgType, ColumnOptions], Parser]
"""Returns the parser of any type."""

NestedFamily = Callable[[PgType, ColumnOptions, ParserOf], Parser]
"""Returns the parser of a type that has component types, given a function that returns their parsers."""


def cast(texts: pa.Array, lake_type: pa.DataType) -> pa.Array | None:
    """Convert texts with Arrow's vectorized cast. Returns None if it rejects a text.

    Arrow's error is dropped, because its message contains the value.
    """
    try:
        return pc.cast(texts, lake_type)
    except pa.ArrowInvalid:
        return None


def not_output_of_type(hint: str = "") -> UnsupportedValue:
    """Return the error of a text that the type's output function never returns under the pinned settings."""
    return UnsupportedValue(
        "a text that PostgreSQL does not write for this type",
        hint
        or "check that nothing on the way to the source (a pooler, a proxy) changes its session settings",
    )


class Text:
    """The parser that keeps the exact text: padded char(n), json as written, time, uuid, enums, others."""

    lake_type: pa.DataType = pa.string()
    csv_type: pa.DataType | None = pa.string()

    def parse(self, texts: pa.Array) -> pa.Array:
        return as_string(texts)


def as_string(texts: pa.Array) -> pa.Array:
    """Return `texts` as `string`, or as `large_string` above 2 GiB, which `string` cannot address."""
    if pa.types.is_string(texts.type):
        return texts
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return texts.cast(pa.large_string())


def text(_: PgType, __: ColumnOptions) -> Text:
    """Return the parser of a type whose lake value is its exact text."""
    return Text()
