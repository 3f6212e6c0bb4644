"""A source table with a column of every kind of lake type, and what PostgreSQL finds in it by each."""

from __future__ import annotations

from typing import Any

from tests.support.readers import Condition, sql_of

PLAIN = {
    "c_bool": ("boolean", "false", "true"),
    "c_int16": ("smallint", "-300", "300"),
    "c_int32": ("integer", "-70000", "70000"),
    "c_int64": ("bigint", "-5000000000", "9007199254740993"),
    "c_float": ("real", "-1.5", "2.25"),
    "c_double": ("double precision", "-1.5", "2.25"),
    "c_cents": ("numeric(12,2)", "-10.50", "99999.99"),
    "c_wide": ("numeric(38,10)", "-1.0000000001", "1234567890123456789012345678.0000000001"),
    "c_money": ("money", "-3.00", "4.00"),
    "c_text": ("text", "aa", "zz" * 300),
    "c_uuid": ("uuid", "00000000-0000-0000-0000-00000000000a", "ffffffff-0000-0000-0000-000000000000"),
    "c_bytes": ("bytea", "00", "ff" * 100),
    "c_date": ("date", "0001-01-01", "9999-12-31"),
    "c_ntz": ("timestamp", "0001-01-01 00:00:00.000001", "9999-12-31 23:59:59.999999"),
    "c_tz": ("timestamptz", "0001-01-01 00:00:00.000001", "9999-12-31 23:59:59.999999"),
    "c_xid8": ("xid8", "5", "18446744073709551615"),
}
"""Columns with an order: their type, and the texts of a low and of a high value."""
NESTED = {
    "c_list": ("integer[]", "'{1,NULL}'"),
    "c_struct": ("part", "'(1,x)'"),
    "c_range": ("int4range", "'[1,5)'"),
}
COLUMNS = {name: of[0] for name, of in (PLAIN | NESTED).items()}
CREATE_TYPE = "create type part as (a integer, b text)"


def declared() -> str:
    return ", ".join(f"{name} {of}" for name, of in COLUMNS.items())


def insert(row_id: int, which: int | None) -> str:
    """`which`: 0 for the low values, 1 for the high ones, None for NULL everywhere."""
    if which is None:
        return f"insert into t (id) values ({row_id})"
    plain = [literal(name, of[1 + which]) for name, of in PLAIN.items()]
    values = ", ".join([*plain, *(of[1] for of in NESTED.values())])
    return f"insert into t (id, {', '.join(COLUMNS)}) values ({row_id}, {values})"


def literal(column: str, text: str) -> str:
    return f"decode('{text}', 'hex')" if column == "c_bytes" else f"'{text}'"


def conditions() -> list[Condition]:
    compared = [
        (name, operator, text)
        for name, (_, low, high) in PLAIN.items()
        for operator in ("=", "<", ">=")
        for text in (low, high)
    ]
    return compared + [(name, operator, "") for name in COLUMNS for operator in ("is null", "is not null")]


def ids_in(source: Any, condition: Condition) -> list[int]:
    """Return the ids of the rows that match the condition in PostgreSQL, in order."""
    with source.cursor() as cursor:
        cursor.execute(f"select id from public.t where {sql_of(condition, literal)} order by id")
        return [row[0] for row in cursor.fetchall()]
