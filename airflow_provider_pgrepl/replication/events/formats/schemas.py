"""Schemas of messages of Debezium's PostgreSQL connector, as Kafka Connect's JSON converter writes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Schema = dict[str, Any]

_SNAPSHOT = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"


def _field(field: str, kind: str, *, optional: bool = False, **more: Any) -> Schema:
    return {"type": kind, "optional": optional, **more, "field": field}


_SOURCE = [
    _field("version", "string"),
    _field("connector", "string"),
    _field("name", "string"),
    _field("ts_ms", "int64"),
    _field(
        "snapshot",
        "string",
        optional=True,
        name="io.debezium.data.Enum",
        version=1,
        parameters={"allowed": _SNAPSHOT},
        default="false",
    ),
    _field("db", "string"),
    _field("sequence", "string", optional=True),
    _field("ts_us", "int64", optional=True),
    _field("ts_ns", "int64", optional=True),
    _field("schema", "string"),
    _field("table", "string"),
    _field("txId", "int64", optional=True),
    _field("lsn", "int64", optional=True),
    _field("xmin", "int64", optional=True),
]
_TRANSACTION = [
    _field("id", "string"),
    _field("total_order", "int64"),
    _field("data_collection_order", "int64"),
]


def envelope_schema(table: str, columns: Sequence[Schema]) -> Schema:
    """Of a message. `table`: name of the source, schema and table, with dots between."""
    row = {"type": "struct", "fields": list(columns), "optional": True, "name": f"{table}.Value"}
    source = {"type": "struct", "fields": _SOURCE, "optional": False, "version": 1, "field": "source"}
    fields = [
        {**row, "field": "before"},
        {**row, "field": "after"},
        {**source, "name": "io.debezium.connector.postgresql.Source"},
        _field("transaction", "struct", optional=True, fields=_TRANSACTION, name="event.block", version=1),
        _field("op", "string"),
        *(_field(name, "int64", optional=True) for name in ("ts_ms", "ts_us", "ts_ns")),
    ]
    return {"type": "struct", "fields": fields, "optional": False, "name": f"{table}.Envelope", "version": 2}


def key_schema(table: str, columns: Sequence[Schema]) -> Schema:
    """Of a message's key."""
    return {"type": "struct", "fields": list(columns), "optional": False, "name": f"{table}.Key"}
