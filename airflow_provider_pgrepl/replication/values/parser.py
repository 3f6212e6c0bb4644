"""What a family of PostgreSQL types must say about itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice


class Unholdable(Exception):  # noqa: N818 - a finding, turned into ValueRangeError by the room's API
    """The lake type cannot hold some value; `reason` says which kind, `hint` what can be done."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason, hint)
        self.reason = reason
        self.hint = hint


class Parser(Protocol):
    """One type's values in the lake.

    Text is always what the type's output function gives under the pinned session settings; null is NULL.
    """

    @property
    def lake_type(self) -> pa.DataType:
        """The Arrow type of the lake column."""

    @property
    def csv_type(self) -> pa.DataType | None:
        """The type to give pyarrow's CSV reader, if all that it accepts equals `parse`; else None."""

    def parse(self, texts: pa.Array) -> pa.Array:
        """Type a `string` or `large_string` array, exactly. Raises Unholdable."""


Family = Callable[[PgType, ColumnChoice], Parser]
"""Makes the parser of one type of the family, as a pipeline wants it in the lake."""

ParserOf = Callable[[PgType, ColumnChoice], Parser]
"""Finds the parser of any type."""

NestedFamily = Callable[[PgType, ColumnChoice, ParserOf], Parser]
"""Makes the parser of a type that is made of others, whose parsers it asks for."""


def cast(texts: pa.Array, lake_type: pa.DataType) -> pa.Array | None:
    """Arrow's own vectorised parser; None when it cannot take some text.

    The error itself is dropped here because Arrow puts the value into its message.
    """
    try:
        return pc.cast(texts, lake_type)
    except pa.ArrowInvalid:
        return None


def not_output_of_type(hint: str = "") -> Unholdable:
    """Text that the type's output function does not give under the pinned settings."""
    return Unholdable(
        "a text that PostgreSQL does not write for this type",
        hint
        or "check that nothing on the way to the source (a pooler, a proxy) changes its session settings",
    )


class Text:
    """The exact text: char(n) with its padding, json as written, time, uuid, enums, all other types."""

    lake_type: pa.DataType = pa.string()
    csv_type: pa.DataType | None = pa.string()

    def parse(self, texts: pa.Array) -> pa.Array:
        return as_string(texts)


def as_string(texts: pa.Array) -> pa.Array:
    """`texts` as `string`; above 2 GiB, which `string` cannot address, as `large_string`."""
    if pa.types.is_string(texts.type):
        return texts
    try:
        return texts.cast(pa.string())
    except pa.ArrowInvalid:
        return texts.cast(pa.large_string())


def text(_: PgType, __: ColumnChoice) -> Text:
    """A type whose text is its value."""
    return Text()
