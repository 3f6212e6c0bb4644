"""numeric."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column
from airflow_provider_pgrepl.replication.values.family import Unholdable, cast, not_output_of_type

_MAX_PRECISION = 38
_NOT_FINITE = pa.array(["NaN", "Infinity", "-Infinity"])


class Numeric:
    """numeric(p,s) as decimal(p,s) where a decimal can be that wide; any other numeric as its exact text."""

    def lake_type(self, column: Column, pipeline: Pipeline) -> pa.DataType:  # noqa: ARG002
        if column.typmod < 0:
            return pa.string()
        precision, scale = precision_and_scale(column.typmod)
        if precision <= _MAX_PRECISION and 0 <= scale <= precision:
            return pa.decimal128(precision, scale)
        return pa.string()

    def csv_type(self, lake_type: pa.DataType) -> pa.DataType | None:
        return lake_type

    def parse(self, texts: pa.Array, lake_type: pa.DataType) -> pa.Array:
        numbers = cast(texts, lake_type)
        if numbers is not None:
            return numbers
        if pc.any(pc.is_in(texts, value_set=_NOT_FINITE.cast(texts.type))).as_py():
            raise Unholdable(
                "NaN or infinity",
                "leave the column out of the publication, or make it numeric without precision"
                " or double precision at the source",
            )
        raise not_output_of_type("the column's precision or scale may have changed: take the table anew")


def precision_and_scale(typmod: int) -> tuple[int, int]:
    """The p and s of numeric(p,s); since PostgreSQL 15 s is from -1000 to 1000 and may be above p."""
    packed = typmod - 4
    return (packed >> 16) & 0xFFFF, ((packed & 0x7FF) ^ 0x400) - 0x400


NUMERIC = Numeric()
