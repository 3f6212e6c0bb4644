"""smallint, integer, bigint; oid, xid, cid; real, double precision."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.parser import Family, cast, not_output_of_type


@dataclass(frozen=True)
class Number:
    """A number of fixed width, which has an Arrow type that holds all of them.

    Floats keep NaN, the infinities and -0; the pinned `extra_float_digits` makes their text exact.
    """

    lake_type: pa.DataType

    @property
    def csv_type(self) -> pa.DataType | None:
        return self.lake_type

    def parse(self, texts: pa.Array) -> pa.Array:
        numbers = cast(texts, self.lake_type)
        if numbers is None:
            raise not_output_of_type()
        return numbers


def _of_width(lake_type: pa.DataType) -> Family:
    parser = Number(lake_type)

    def number(_: PgType, __: ColumnChoice) -> Number:
        return parser

    return number


smallint, integer, bigint = _of_width(pa.int16()), _of_width(pa.int32()), _of_width(pa.int64())
# Unsigned, of 32 bits, which Delta does not know.
oid = _of_width(pa.int64())
real, double = _of_width(pa.float32()), _of_width(pa.float64())
