"""numeric."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.choices import ColumnChoice
from airflow_provider_pgrepl.replication.relation import PgType
from airflow_provider_pgrepl.replication.values.family import Parser, Unholdable, cast, not_output_of_type
from airflow_provider_pgrepl.replication.values.text import Text

_MAX_PRECISION = 38
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])


@dataclass(frozen=True)
class Decimal:
    """numeric as a decimal. NaN and the infinities, which it cannot hold, are null by choice, or an error."""

    lake_type: pa.DataType
    odd_is_null: bool

    @property
    def csv_type(self) -> pa.DataType | None:
        return self.lake_type

    def parse(self, texts: pa.Array) -> pa.Array:
        numbers = cast(texts, self.lake_type)
        if numbers is not None:
            return numbers
        odd = pc.is_in(texts, value_set=_NOT_FINITE.cast(texts.type))
        if not pc.any(odd).as_py():
            raise not_output_of_type("the column's precision or scale may have changed: take the table anew")
        if not self.odd_is_null:
            raise Unholdable(
                "NaN or infinity",
                "set numeric_nan to null, or give the column lake type string in types; then take it anew",
            )
        numbers = cast(pc.if_else(odd, pa.scalar(None, texts.type), texts), self.lake_type)
        if numbers is None:
            raise not_output_of_type()
        return numbers


def numeric(pg_type: PgType, choice: ColumnChoice) -> Parser:
    """numeric(p,s) as decimal(p,s) where a decimal can be that wide; any other numeric as its exact text."""
    chosen = choice.lake_type
    if chosen is None and pg_type.typmod < 0:
        chosen = choice.unconstrained_numeric
    if chosen is not None:
        if chosen.name != "decimal":
            return Text()
        return Decimal(pa.decimal128(chosen.precision, chosen.scale), choice.numeric_nan == "null")
    precision, scale = precision_and_scale(pg_type.typmod)
    if precision <= _MAX_PRECISION and 0 <= scale <= precision:
        return Decimal(pa.decimal128(precision, scale), choice.numeric_nan == "null")
    return Text()


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """The p and s of numeric(p,s); since PostgreSQL 15 s is from -1000 to 1000 and may be above p."""
    packed = typmod - 4
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400
