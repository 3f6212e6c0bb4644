"""vector and halfvec, of pgvector's extension `vector`."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnChoice
from airflow_provider_pgrepl.replication.values.array import list_array
from airflow_provider_pgrepl.replication.values.nested import split_array
from airflow_provider_pgrepl.replication.values.parser import cast, not_output_of_type


class Vector:
    """A list of numbers of 32 bits, which hold those of 16 exactly."""

    lake_type: pa.DataType = pa.list_(pa.float32())
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        parts = split_array(texts, brackets="[]")
        numbers = cast(parts.texts, pa.float32())
        if numbers is None or numbers.null_count:
            raise not_output_of_type()
        return list_array(parts.starts, numbers, texts)


def vector(_: PgType, __: ColumnChoice) -> Vector:
    """vector, of pgvector."""
    return Vector()
