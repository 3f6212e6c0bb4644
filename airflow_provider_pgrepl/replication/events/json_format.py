"""A change as JSON text, exact: what JSON's numbers cannot say is a string."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Mapping
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

from airflow_provider_pgrepl.replication.events.change import Change

_DUMPS = json.JSONEncoder(ensure_ascii=False).encode
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
    fields = {
        "table": _DUMPS(change.table),
        "op": _DUMPS(change.op),
        "data": _row(change.data, change.json_columns),
        "old": _row(change.old, change.json_columns),
        "id": _DUMPS(change.id),
        "commit_lsn": _DUMPS(str(change.commit_lsn)),
        "commit_ts": _value(change.commit_ts),
        "xid": str(change.xid),
    }
    if change.unchanged:
        fields["unchanged"] = _DUMPS(change.unchanged)
    return _object(fields).translate(_LINES)


def _row(row: Mapping[str, Any] | None, json_columns: Collection[str]) -> str:
    if row is None:
        return "null"
    return _object(
        {
            name: _embedded(value) if name in json_columns and value is not None else _value(value)
            for name, value in row.items()
        }
    )


def _embedded(text: str) -> str:
    """JSON that PostgreSQL has checked. A line break, which type json keeps, is a space between its parts."""
    return text.translate(_BREAKS)


def _object(fields: Mapping[str, str]) -> str:
    return "{" + ",".join(f"{_DUMPS(name)}:{value}" for name, value in fields.items()) + "}"


def _value(value: Any) -> str:
    if value is None or isinstance(value, bool | str):
        return _DUMPS(value)
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else _DUMPS(_not_finite(value))
    if isinstance(value, Decimal):
        return _DUMPS(format(value, "f"))
    if isinstance(value, datetime):
        moment = value if value.tzinfo is None else value.astimezone(UTC).replace(tzinfo=None)
        return _DUMPS(moment.isoformat() + ("" if value.tzinfo is None else "Z"))
    if isinstance(value, date):
        return _DUMPS(value.isoformat())
    if isinstance(value, bytes):
        return _DUMPS(base64.b64encode(value).decode())
    if isinstance(value, Mapping):
        return _object({str(name): _value(one) for name, one in value.items()})
    return "[" + ",".join(map(_value, value)) + "]"


def _not_finite(value: float) -> str:
    """As PostgreSQL writes it."""
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
