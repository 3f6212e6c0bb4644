"""A change as JSON text, exact: what JSON's numbers cannot say is a string."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from functools import lru_cache
from typing import Any
from uuid import UUID

from airflow_provider_pgrepl.replication.events.change import Change

json_string: Callable[[str], str] = json.encoder.encode_basestring
"""A text in quotes. Whoever puts it into a line gives that to `on_one_line`."""
_BREAKS = str.maketrans("\r\n", "  ")
_LINES = {0x85: r"\u0085", 0x2028: r"\u2028", 0x2029: r"\u2029"}
"""What some readers take for the end of a line; in JSON it stands within strings only."""


def to_json(change: Change) -> str:
    """One line: `{"table", "op", "data", "old", "id", "commit_lsn", "commit_ts", "xid"}`, and `unchanged`
    when an update left large values out.

    Integers and finite floats are numbers; `numeric`, and NaN and infinities of floats, are strings; bytea is
    base64; moments are ISO 8601, in UTC with `Z`; json and jsonb are what they say; arrays are arrays, and
    what has fields is an object.
    """
    row, json_columns = change.data, change.json_columns
    unchanged = f',"unchanged":{json_value(change.unchanged)}' if change.unchanged else ""
    text = (
        f'{{"table":{json_string(change.table)},"op":"{change.op}","data":{_row(row, json_columns)}'
        f',"old":{_row(change.old, json_columns)},"id":"{change.id}","commit_lsn":"{change.commit_lsn}"'
        f',"commit_ts":{_commit_ts(change.commit_ts)},"xid":{change.xid}{unchanged}}}'
    )
    return on_one_line(text)


def on_one_line(text: str) -> str:
    """JSON whose strings hold nothing that some readers take for the end of a line."""
    return text if text.isascii() else text.translate(_LINES)


def to_json_object(row: Mapping[str, Any], json_columns: Collection[str] = ()) -> str:
    """Some columns of a row, as in `data`."""
    text = _row(row, json_columns)
    return text if text.isascii() else text.translate(_LINES)


def _row(row: Mapping[str, Any] | None, json_columns: Collection[str]) -> str:
    if row is None:
        return "null"
    if not json_columns:
        return _object(row)
    values = (
        embedded(value) if name in json_columns and value is not None else json_value(value)
        for name, value in row.items()
    )
    fields = [f"{json_string(name)}:{value}" for name, value in zip(row, values, strict=True)]
    return "{" + ",".join(fields) + "}"


def embedded(text: str) -> str:
    """JSON that PostgreSQL has checked. A line break, which type json keeps, is a space between its parts."""
    return text.translate(_BREAKS)


def _object(fields: Mapping[str, Any]) -> str:
    written = [f"{json_string(name)}:{json_value(value)}" for name, value in fields.items()]
    return "{" + ",".join(written) + "}"


def json_value(value: Any) -> str:
    """Any value of a change."""
    write = _WRITERS.get(type(value))
    return _other(value) if write is None else write(value)


def _float(value: float) -> str:
    """What is not finite is a text, as PostgreSQL writes it."""
    if math.isfinite(value):
        return repr(value)
    return '"NaN"' if math.isnan(value) else '"Infinity"' if value > 0 else '"-Infinity"'


def _moment(value: datetime) -> str:
    if value.tzinfo is None:
        return f'"{value.isoformat()}"'
    return f'"{value.astimezone(UTC).replace(tzinfo=None).isoformat()}Z"'


@lru_cache(1_000)
def _commit_ts(value: datetime) -> str:
    """All changes of a transaction have it."""
    return _moment(value)


_WRITERS: dict[type, Callable[[Any], str]] = {
    str: json_string,
    int: int.__repr__,
    UUID: lambda value: f'"{value}"',
    bool: lambda value: "true" if value else "false",
    type(None): lambda _: "null",
    float: _float,
    Decimal: lambda value: f'"{value:f}"',
    datetime: _moment,
    date: lambda value: f'"{value.isoformat()}"',
    bytes: lambda value: f'"{base64.b64encode(value).decode()}"',
}


def _other(value: Any) -> str:
    """An array, something with fields, or a subclass of what values are made of."""
    if isinstance(value, Mapping):
        return _object({str(name): one for name, one in value.items()})
    for kind, write in _WRITERS.items():
        if isinstance(value, kind):
            return write(value)
    return "[" + ",".join(map(json_value, value)) + "]"
