"""Values of the lake written as PostgreSQL reads them, for it to say whether they are the source's."""

from __future__ import annotations

import math
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.values.text_output import texts_of

_POSTGIS = ("geometry", "geography")


def rendered(value: Any, of: PgType) -> str | None:
    """A text that the type can be read from. `value` is what Arrow gives for the lake's value."""
    if value is None or isinstance(value, str):
        return value
    if of.kind == "d":
        return rendered(value, of.only_part)
    if of.kind == "a":
        return _list(value, of.only_part, of.only_part.delimiter)
    if of.kind == "m":
        return "{" + ",".join(_range(item, of.only_part) for item in value) + "}"
    if of.kind == "r":
        return _range(value, of)
    if of.kind == "c":
        parts = (rendered(value[name], part) for name, part in of.parts)
        return "(" + ",".join("" if part is None else _quoted(part) for part in parts) + ")"
    if of.extension == "hstore":
        return ",".join(f"{_quoted(key)}=>{'NULL' if item is None else _quoted(item)}" for key, item in value)
    if of.extension == "vector":
        return "[" + ",".join(map(repr, value)) + "]"
    return value.hex() if of.name in _POSTGIS else _scalar(value)


def _list(value: list[Any], element: PgType, delimiter: str) -> str:
    is_list = element.kind in "adm" or element.extension in ("hstore", "vector")
    if value and isinstance(value[0], list) and not is_list:
        return "{" + delimiter.join(_list(row, element, delimiter) for row in value) + "}"
    items = (rendered(item, element) for item in value)
    return "{" + delimiter.join("NULL" if item is None else _quoted(item) for item in items) + "}"


def _range(value: dict[str, Any], of: PgType) -> str:
    if value["empty"]:
        return "empty"
    bounds = (rendered(value[name], of.only_part) for name in ("lower", "upper"))
    lower, upper = ("" if bound is None else _quoted(bound) for bound in bounds)
    return f"{'(['[value['lower_inclusive']]}{lower},{upper}{')]'[value['upper_inclusive']]}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _scalar(value: Any) -> str:
    if isinstance(value, bool):
        return "t" if value else "f"
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else repr(value).replace("inf", "Infinity")
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, datetime | date):
        return value.isoformat()
    return str(value)


def written(found: pa.ChunkedArray, column: Column) -> list[str | None]:
    """Return the text that the package writes for the lake's values in place of PostgreSQL."""
    return [text for chunk in found.chunks for text in texts_of(chunk, column.pg_type).to_pylist()]


def source_texts(source: Connection, column: Column, table: str = "s.t") -> list[str | None]:
    """Return PostgreSQL's text of the source's values, in the order of `id`."""
    with source.cursor() as cursor:
        cursor.execute(f"select {_written(column.name)} from {table} order by {table}.id")
        return [text for (text,) in cursor.fetchall()]


def lake_texts(source: Connection, column: Column, values: pa.ChunkedArray) -> list[str | None]:
    """Return PostgreSQL's text of the lake's values."""
    texts = [rendered(value, column.pg_type) for value in values.to_pylist()]
    with source.cursor() as cursor:
        cursor.execute(
            f"select {_written('y')} from (select x::{column.type_name}, n"
            " from unnest(%s::text[]) with ordinality u(x, n)) v(y, n) order by n",
            (texts,),
        )
        return [text for (text,) in cursor.fetchall()]


def _written(sql: str) -> str:
    """Return SQL for the type's output function: a cast to text may differ, as for boolean."""
    return f"case when num_nulls({sql}) = 0 then concat({sql}) end"
