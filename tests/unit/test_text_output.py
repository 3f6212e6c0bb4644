"""values/text_output.py: each registered type has the texts back that PostgreSQL writes for its values."""

from __future__ import annotations

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, LakeType
from airflow_provider_pgrepl.replication.values.registry import (
    _BUILT_IN,
    _OF_EXTENSIONS,
    _OF_KINDS,
    _WRITERS,
    parser_of,
)
from airflow_provider_pgrepl.replication.values.text_output import texts_of, unwritable

OWN = 16_384
"""An OID that is not built in."""
MONEY = PgType(oids.MONEY, name="money")
INTEGERS = PgType(OWN, name="int8range", kind="r", parts=(("subtype", PgType(oids.INT8)),))
POINT = "0101000020E6100000000000000000F03F0000000000000040"
TEXTS: dict[int | tuple[str, str] | str, list[str]] = {
    oids.BOOL: ["t", "f"],
    oids.BYTEA: ["\\x", "\\x00ff0a"],
    oids.INT8: ["-9223372036854775808", "9223372036854775807"],
    oids.INT2: ["-32768", "32767"],
    oids.INT2VECTOR: ["", "1 -2 3"],
    oids.INT4: ["-2147483648", "2147483647"],
    oids.OID: ["0", "4294967295"],
    oids.XID: ["0", "4294967295"],
    oids.CID: ["0", "4294967295"],
    oids.OIDVECTOR: ["", "1 4294967295"],
    oids.FLOAT4: ["-0", "NaN", "Infinity", "1e+06", "0.0001", "3.4028235e+38"],
    oids.FLOAT8: ["-0", "NaN", "-Infinity", "1e+15", "0.0001", "5e-324"],
    oids.MONEY: ["$0.00", "-$92,233,720,368,547,758.08", "$1,234.50"],
    oids.DATE: ["1970-01-01", "0044-03-15 BC", "10000-12-31"],
    oids.TIMESTAMP: ["1970-01-01 00:00:00", "0044-03-15 23:59:59.5 BC", "2024-02-29 12:00:00.000001"],
    oids.TIMESTAMPTZ: ["1970-01-01 00:00:00+00", "0044-03-15 23:59:59.5+00 BC"],
    oids.NUMERIC: ["0.00", "-12345678.90"],
    oids.XID8: ["0", "18446744073709551615"],
    ("hstore", "hstore"): ["", '"a"=>NULL, "b"=>"NULL", "c \\"d\\\\"=>""'],
    ("postgis", "geography"): [POINT],
    ("postgis", "geometry"): [POINT],
    ("vector", "halfvec"): ["[1,0.5,-2]"],
    ("vector", "vector"): ["[1,0.1,-2e+10]"],
    "a": ["{}", '{"$1,000.00",-$2.50,NULL}'],
    "c": ['(,"$1,000.00")', "(f,)"],
    "m": ["{}", "{[1,3),[5,)}"],
    "r": ["empty", "[1,3)", "(,)"],
}
"""Texts of a type, by its key in the registry. Those of composite types hold a type with its own writer."""
PARTS = {
    "a": (("element", MONEY),),
    "c": (("flag", PgType(oids.BOOL)), ("price", MONEY)),
    "m": (("range", INTEGERS),),
    "r": INTEGERS.parts,
}


def type_of(key: int | tuple[str, str] | str) -> PgType:
    if isinstance(key, int):
        return PgType(key, typmod=(10 << 16 | 2) + 4 if key == oids.NUMERIC else -1)
    if isinstance(key, tuple):
        return PgType(OWN, name=key[1], extension=key[0])
    return PgType(OWN, kind=key, parts=PARTS[key])


def test_every_registered_type_has_texts() -> None:
    assert TEXTS.keys() == _BUILT_IN.keys() | _OF_EXTENSIONS.keys() | _OF_KINDS.keys()
    assert _WRITERS.keys() <= TEXTS.keys()


@pytest.mark.parametrize("key", TEXTS, ids=str)
def test_texts_of_a_type_come_back_from_the_lake(key: int | tuple[str, str] | str) -> None:
    """A type that lacks its writer would come back as another text, without an error."""
    texts = [*TEXTS[key], None]
    for choice in (ColumnOptions(), ColumnOptions(lake_type=LakeType("string"))):
        values = parser_of(type_of(key), choice).parse(pa.array(texts, pa.large_string()))
        assert texts_of(values, type_of(key)).to_pylist() == texts


NUMRANGE = PgType(OWN, name="numrange", kind="r", parts=(("subtype", PgType(oids.NUMERIC)),))
DATES = PgType(OWN, kind="a", parts=(("element", PgType(oids.DATE)),))
CENTS = PgType(oids.NUMERIC, typmod=(10 << 16 | 2) + 4)
DECIMAL = LakeType("decimal", 38, 4)


@pytest.mark.parametrize(
    ("pg_type", "options", "is_written"),
    [
        (PgType(oids.NUMERIC), ColumnOptions(), True),
        (PgType(oids.NUMERIC), ColumnOptions(unconstrained_numeric=DECIMAL), False),
        (NUMRANGE, ColumnOptions(unconstrained_numeric=DECIMAL), False),
        (CENTS, ColumnOptions(), True),
        (CENTS, ColumnOptions(lake_type=DECIMAL), False),
        (CENTS, ColumnOptions(numeric_nan="null"), False),
        (CENTS, ColumnOptions(numeric_nan="null", lake_type=LakeType("string")), True),
        (MONEY, ColumnOptions(lake_type=DECIMAL), True),
        (PgType(OWN, kind="d", parts=(("base", CENTS),)), ColumnOptions(lake_type=DECIMAL), False),
        (DATES, ColumnOptions(), True),
        (DATES, ColumnOptions(infinity="sentinel"), False),
        (PgType(oids.TIMESTAMPTZ), ColumnOptions(infinity="null"), False),
        (PgType(oids.TIMESTAMP), ColumnOptions(infinity="null", timestamp_without_tz="string"), True),
        (PgType(oids.INT4), ColumnOptions(infinity="null", numeric_nan="null"), True),
    ],
)
def test_columns_whose_texts_the_lake_does_not_keep_are_known(
    pg_type: PgType, options: ColumnOptions, is_written: bool
) -> None:
    assert bool(unwritable(pg_type, options)) is not is_written
