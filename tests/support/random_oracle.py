"""Rows as PostgreSQL writes them: those of the source, and those of the lake handed back to PostgreSQL.

What the lake keeps as text must be that very text. Any other value is read back as the column's type, and
written by the same server under the same settings.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.support.random_tables import Column, Table
from tests.support.random_types import quoted

Rows = Counter[tuple[str | None, ...]]

_TEXTS = (pa.string(), pa.large_string(), pa.string_view())


def source_rows(connection: Connection, table: Table) -> Rows:
    """Return the source's rows as text, counted."""
    shown = ", ".join(written(column.sql) for column in table.columns)
    with connection.cursor() as cursor:
        cursor.execute(f"select {shown} from {table.sql}")
        return Counter(cursor.fetchall())


def lake_rows(connection: Connection, table: Table, lake: pa.Table) -> Rows:
    """Return the lake table's rows as PostgreSQL writes them, counted."""
    found = pa.table(lake)
    columns = [lake_texts(connection, column, found[column.name]) for column in table.columns]
    return Counter(zip(*columns, strict=True))


def difference(source: Rows, lake: Rows) -> dict[tuple[str | None, ...], int]:
    """Rows and how many more of them the lake has than the source."""
    counts = Counter(lake)
    counts.subtract(source)
    return {tuple(text and text[:80] for text in row): count for row, count in counts.items() if count}


def written(sql: str) -> str:
    """Return SQL for the type's own output: a cast to text removes the padding of a `char(n)`."""
    return f"case when num_nulls({sql}) = 0 then concat({sql}) end"


def lake_texts(connection: Connection, column: Column, values: pa.ChunkedArray) -> list[str | None]:
    if values.type in _TEXTS:
        return list(values.to_pylist())
    texts = [None if not scalar.is_valid else input_text(scalar) for scalar in values]
    with connection.cursor() as cursor:
        cursor.execute(
            f"select {written('y')} from (select n, {read_as(values.type, column.type.sql)} as y"
            " from unnest(%s::text[]) with ordinality as u(x, n)) v order by n",
            (texts,),
        )
        return [row[0] for row in cursor.fetchall()]


def read_as(lake_type: pa.DataType, sql: str) -> str:
    """SQL from the text `x` to a value of the type."""
    if pa.types.is_date(lake_type):
        return f"(date '1970-01-01' + x::int)::{sql}"
    if pa.types.is_timestamp(lake_type):
        zone = "tz" if lake_type.tz else ""
        # Not as microseconds alone: before version 15 an interval's text cannot hold such numbers.
        hours = "floor(x::numeric / 3600000000)"
        rest = f"make_interval(secs => ((x::numeric - {hours} * 3600000000) / 1000000)::float8)"
        since = f"make_interval(hours => {hours}::int) + {rest}"
        return f"(timestamp{zone} '1970-01-01' + ({since}))::{sql}"
    return f"x::{sql}"


def input_text(scalar: Any) -> str:
    """Return a text that PostgreSQL reads the value from. For times and dates: microseconds or days since
    1970."""
    kind = scalar.type
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        return str(scalar.value)
    value = scalar.as_py()
    if pa.types.is_float32(kind):
        return str(np.float32(value))
    if isinstance(value, bytes):
        return "\\x" + value.hex()
    if isinstance(value, list):
        return "{" + ",".join(_item(item) for item in scalar.values) + "}"
    if pa.types.is_struct(kind) and "lower_inclusive" in value:
        return _range(**value)
    if pa.types.is_struct(kind):
        return "(" + ",".join("" if item is None else quoted(str(item)) for item in value.values()) + ")"
    return str(value)


def _range(lower: Any, upper: Any, lower_inclusive: bool, upper_inclusive: bool, empty: bool) -> str:
    low, high = ("" if bound is None else quoted(str(bound)) for bound in (lower, upper))
    return "empty" if empty else f"{'(['[lower_inclusive]}{low},{high}{')]'[upper_inclusive]}"


def _item(scalar: Any) -> str:
    if not scalar.is_valid:
        return "NULL"
    if pa.types.is_list(scalar.type):
        return input_text(scalar)
    value = scalar.as_py()
    return quoted(input_text(scalar) if isinstance(value, bytes) else str(value))
