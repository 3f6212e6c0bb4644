"""Ranges and multiranges."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.array import list_array
from airflow_provider_pgrepl.replication.values.nested import split_multirange, split_record
from airflow_provider_pgrepl.replication.values.parser import Parser, ParserOf, Unholdable

_EMPTY = "empty"


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
        raise Unholdable(reason, f"give the column the lake type string in types; then {hints.RESNAPSHOT}")


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
