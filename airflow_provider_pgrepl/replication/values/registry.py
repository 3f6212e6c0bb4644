"""The registry of PostgreSQL types: the parser family of each type, and its writer."""

from __future__ import annotations

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.relation import MOST_LEVELS, MOST_PARTS, TOO_LARGE, PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions

from .nested import array, composite, hstore, multirange, range_, vector
from .parser import Family, NestedFamily, Parser, Writer, text
from .scalars import (
    bigint,
    binary,
    boolean,
    double,
    integer,
    money,
    money_text,
    numeric,
    oid,
    real,
    smallint,
    spatial,
    spatial_text,
    xid8,
)
from .temporal import date, timestamp, timestamptz

_BUILT_IN: dict[int, Family] = {
    oids.BOOL: boolean,
    oids.BYTEA: binary,
    oids.INT8: bigint,
    oids.INT2: smallint,
    oids.INT2VECTOR: text,  # see oids.VECTORS
    oids.INT4: integer,
    oids.OID: oid,
    oids.XID: oid,
    oids.CID: oid,
    oids.OIDVECTOR: text,
    oids.FLOAT4: real,
    oids.FLOAT8: double,
    oids.MONEY: money,
    oids.DATE: date,
    oids.TIMESTAMP: timestamp,
    oids.TIMESTAMPTZ: timestamptz,
    oids.NUMERIC: numeric,
    oids.XID8: xid8,
}
# By the extension that owns the type, and by the type's name.
_OF_EXTENSIONS: dict[tuple[str, str], Family] = {
    ("hstore", "hstore"): hstore,
    ("postgis", "geography"): spatial,
    ("postgis", "geometry"): spatial,
    ("vector", "halfvec"): vector,
    ("vector", "vector"): vector,
}
# By the kind of a type with component types.
_OF_KINDS: dict[str, NestedFamily] = {
    "a": array,
    "c": composite,
    "m": multirange,
    "r": range_,
}
# By the key of _BUILT_IN or of _OF_EXTENSIONS: types whose texts differ from those of their Arrow type.
_WRITERS: dict[int | tuple[str, str], Writer] = {
    oids.MONEY: money_text,
    ("postgis", "geography"): spatial_text,
    ("postgis", "geometry"): spatial_text,
}


def writer_of(pg_type: PgType) -> Writer | None:
    """Return the writer of a type's values, or None if the Arrow type decides how they are written."""
    return _WRITERS.get(pg_type.oid) or _WRITERS.get((pg_type.extension, pg_type.name))


def parser_of(pg_type: PgType, choice: ColumnOptions) -> Parser:
    """Return the parser of a type. Values of an unregistered type are kept as exact text.

    Raises ConfigError. Its message begins with a verb; the caller adds the column as the subject.
    """
    chosen = choice.lake_type
    if chosen is not None and chosen.name == "string":
        return text(pg_type, choice)
    if pg_type.kind == "d":
        return parser_of(pg_type.only_part, choice)
    if chosen is not None and chosen.name == "array" and pg_type.kind != "a":
        raise ConfigError(
            f"cannot be {chosen}, only arrays can",
            "leave the column out of types",
        )
    if pg_type.kind == TOO_LARGE:
        raise ConfigError(
            f"is made of more than {MOST_LEVELS} levels or, with those of other columns, {MOST_PARTS} parts",
            "keep its values as texts (text_columns), or leave the column out (exclude_columns)",
        )
    parser = _parser_of(pg_type, choice)
    if (
        chosen is not None
        and chosen.name == "decimal"
        and parser.lake_type != pa.decimal128(chosen.precision, chosen.scale)
    ):
        raise ConfigError(
            f"cannot be {chosen}, only numeric and money can",
            "use string, which is the exact text, or leave the column out of types",
        )
    return parser


def _parser_of(pg_type: PgType, choice: ColumnOptions) -> Parser:
    family = _BUILT_IN.get(pg_type.oid) or _OF_EXTENSIONS.get((pg_type.extension, pg_type.name))
    if family is not None:
        return family(pg_type, choice)
    nested = _OF_KINDS.get(pg_type.kind)
    return text(pg_type, choice) if nested is None else nested(pg_type, choice, parser_of)
