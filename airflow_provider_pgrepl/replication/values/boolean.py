"""boolean."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.parser import not_output_of_type


class Boolean:
    """boolean, which PostgreSQL writes `t` or `f`; the CSV reader must be told the same two words."""

    lake_type: pa.DataType = pa.bool_()
    csv_type: pa.DataType | None = pa.bool_()

    def parse(self, texts: pa.Array) -> pa.Array:
        true = pc.equal(texts, pa.scalar("t", texts.type))
        false = pc.equal(texts, pa.scalar("f", texts.type))
        if pc.all(pc.or_(true, false)).as_py() is False:
            raise not_output_of_type()
        return true


def boolean(_: PgType, __: ColumnChoice) -> Boolean:
    """boolean."""
    return Boolean()
