"""Which family a PostgreSQL type belongs to: one line for each type."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.choices import ColumnChoice
from airflow_provider_pgrepl.replication.relation import PgType
from airflow_provider_pgrepl.replication.values.binary import binary
from airflow_provider_pgrepl.replication.values.boolean import boolean
from airflow_provider_pgrepl.replication.values.family import Family, Parser
from airflow_provider_pgrepl.replication.values.fixed_width import bigint, double, integer, real, smallint
from airflow_provider_pgrepl.replication.values.numeric import numeric
from airflow_provider_pgrepl.replication.values.temporal import date, timestamp, timestamptz
from airflow_provider_pgrepl.replication.values.text import text

# By pg_type.oid, which is fixed for built-in types.
_BUILT_IN: dict[int, Family] = {
    16: boolean,
    17: binary,  # bytea
    20: bigint,
    21: smallint,
    23: integer,
    700: real,
    701: double,
    1082: date,
    1114: timestamp,
    1184: timestamptz,
    1700: numeric,
}
# By the extension that owns the type, and the type's name.
_OF_EXTENSIONS: dict[tuple[str, str], Family] = {}
# By what the type is made of.
_OF_KINDS: dict[str, Family] = {}


def parser_of(pg_type: PgType, choice: ColumnChoice) -> Parser:
    """The parser of a type; a type without a line is kept as its exact text. Raises ConfigError."""
    if choice.lake_type is not None and choice.lake_type.name == "string":
        return text(pg_type, choice)
    family = (
        _BUILT_IN.get(pg_type.oid)
        or _OF_EXTENSIONS.get((pg_type.extension, pg_type.name))
        or _OF_KINDS.get(pg_type.kind, text)
    )
    parser = family(pg_type, choice)
    if choice.lake_type is not None and choice.lake_type.name == "decimal" and family is not numeric:
        raise ConfigError(f"types: decimal does not fit a column of type {pg_type.name}", "use string")
    return parser
