"""smallint, integer, bigint; real, double precision."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column
from airflow_provider_pgrepl.replication.values.family import cast, not_output_of_type


@dataclass(frozen=True)
class Number:
    """A number of fixed width, which has an Arrow type of the same width.

    Floats keep NaN, the infinities and -0; the pinned `extra_float_digits` makes their text exact.
    """

    arrow_type: pa.DataType

    def lake_type(self, column: Column, pipeline: Pipeline) -> pa.DataType:  # noqa: ARG002
        return self.arrow_type

    def csv_type(self, lake_type: pa.DataType) -> pa.DataType | None:
        return lake_type

    def parse(self, texts: pa.Array, lake_type: pa.DataType) -> pa.Array:
        numbers = cast(texts, lake_type)
        if numbers is None:
            raise not_output_of_type()
        return numbers


SMALLINT = Number(pa.int16())
INTEGER = Number(pa.int32())
BIGINT = Number(pa.int64())
REAL = Number(pa.float32())
DOUBLE = Number(pa.float64())
