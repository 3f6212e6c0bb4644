"""The comparison of source and lake by row and column, without the provider's own conversion of values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import psycopg2
from psycopg2.extensions import connection as Connection  # noqa: N812 - a class

from demo.lake import Lake

Row = tuple[Any, ...]

_COLUMNS = """
    select attname, attnum = any(coalesce(conkey, '{}')), format_type(atttypid, null) in ('text', 'character')
    from pg_attribute left join pg_constraint on conrelid = attrelid and contype = 'p'
    where attrelid = %s::regclass and attnum > 0 and not attisdropped
    order by attnum
"""
_FETCH = 20_000


@dataclass(frozen=True)
class Result:
    """The number of compared rows, and of those that differ or are on one side only."""

    table: str
    rows: int
    differences: int

    def __str__(self) -> str:
        verdict = "equal" if not self.differences else f"{self.differences:,} DIFFERENT"
        return f"{self.table}: {self.rows:,} rows, {verdict}"


def compare(dsn: str, lake: Lake, table: str) -> Result:
    """Compare each row of a table in all columns. Both sides are read sorted and in pieces."""
    with closing(psycopg2.connect(dsn)) as connection:
        columns, order = _shape(connection, table)
        rows = differences = 0
        source = _source_rows(connection, f"select {columns} from {table} order by {order}")
        for ours, theirs in zip_longest(lake.rows(table, columns, order), source):
            rows += 1
            differences += ours != theirs
        return Result(table, rows, differences)


def _shape(connection: Connection, table: str) -> tuple[str, str]:
    """Return the columns of a table, and the columns to sort by.

    These are the primary key, or else all columns except text: the order of text depends on the locale.
    """
    with connection.cursor() as cursor:
        cursor.execute(_COLUMNS, (table,))
        found = cursor.fetchall()
    keys = [name for name, is_key, _ in found if is_key] or [
        name for name, _, is_text in found if not is_text
    ]
    return ", ".join(name for name, _, _ in found), ", ".join(keys)


def _source_rows(connection: Connection, query: str) -> Iterator[Row]:
    # Use a named cursor: the result stays on the server, and this process holds one piece of it.
    with connection.cursor("demo_comparison") as cursor:
        cursor.itersize = _FETCH
        cursor.execute(query)
        yield from cursor
