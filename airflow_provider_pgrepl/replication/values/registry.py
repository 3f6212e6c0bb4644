"""Which family a PostgreSQL type belongs to: one line for each type."""

from __future__ import annotations

from airflow_provider_pgrepl.replication.relation import Column
from airflow_provider_pgrepl.replication.values.binary import BINARY
from airflow_provider_pgrepl.replication.values.boolean import BOOLEAN
from airflow_provider_pgrepl.replication.values.family import Family
from airflow_provider_pgrepl.replication.values.fixed_width import BIGINT, DOUBLE, INTEGER, REAL, SMALLINT
from airflow_provider_pgrepl.replication.values.numeric import NUMERIC
from airflow_provider_pgrepl.replication.values.temporal import DATE, TIMESTAMP, TIMESTAMPTZ
from airflow_provider_pgrepl.replication.values.text import TEXT

# By pg_type.oid, which is fixed for built-in types.
_FAMILIES: dict[int, Family] = {
    16: BOOLEAN,
    17: BINARY,  # bytea
    20: BIGINT,
    21: SMALLINT,
    23: INTEGER,
    700: REAL,
    701: DOUBLE,
    1082: DATE,
    1114: TIMESTAMP,
    1184: TIMESTAMPTZ,
    1700: NUMERIC,
}


def family_of(column: Column) -> Family:
    """The family of the column's type; a type without a line is kept as its exact text."""
    return _FAMILIES.get(column.type_oid, TEXT)
