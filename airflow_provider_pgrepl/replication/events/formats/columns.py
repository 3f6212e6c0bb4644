"""A column as Debezium has it: the schema of its field, how its texts become JSON, and what it sends instead
of a large value that the server did not."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.events.columns import PublishedColumn
from airflow_provider_pgrepl.replication.events.formats import debezium_types
from airflow_provider_pgrepl.replication.events.formats.debezium_types import Encode
from airflow_provider_pgrepl.replication.events.formats.json_text import TEXT
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import PgType
from airflow_provider_pgrepl.replication.settings.tables import TableChoices
from airflow_provider_pgrepl.replication.values import TypedColumn
from airflow_provider_pgrepl.replication.values.parser import Unholdable
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

Schema = dict[str, Any]

UNAVAILABLE = "__debezium_unavailable_value"
_INTEGERS = ("int16", "int32", "int64")
_VECTORS = (22, 30)
"""int2vector and oidvector, which pg_type calls arrays and does not write as such."""
_ZEROS = {
    "org.apache.kafka.connect.data.Decimal": '"AA=="',
    "io.debezium.data.VariableScaleDecimal": '{"scale":0,"value":"AA=="}',
    "io.debezium.time.ZonedTime": '"00:00:00Z"',
    "io.debezium.time.ZonedTimestamp": '"1970-01-01T00:00:00Z"',
    "io.debezium.data.geometry.Point": '{"x":0.0,"y":0.0,"wkb":"AQEAAAAAAAAAAAAAAAAAAAAAAAAA","srid":null}',
    "boolean": "false",
    "float": "0.0",
    "double": "0.0",
    "string": '""',
    "bytes": '""',
    "array": "[]",
}
"""By the name of a schema, or its type; all others are integers."""
_SHORT = 3
"""Digits of a second up to which milliseconds are enough."""


@dataclass(frozen=True)
class _Type:
    schema: Schema
    encode: Encode


@dataclass(frozen=True)
class DebeziumColumn(TypedColumn):
    """A column whose values are their JSON."""

    def parse(self, texts: pa.Array | pa.ChunkedArray) -> pa.Array:
        """Raises ValueRangeError, which names column and table, never the value."""
        try:
            return self.parser.parse(texts)
        except Unholdable as unholdable:
            reason, hint = unholdable.reason, unholdable.hint
        raise ValueRangeError(
            f'column "{one_line(self.name)}" of {self.table} holds a value that Debezium\'s format cannot:'
            f" {reason}",
            hint,
        )


@dataclass(frozen=True)
class DebeziumParser:
    """Stands where a column's values would be typed: its values are their JSON. `unavailable`: what is sent
    of a large value that an update left as it was; None where Debezium has nothing to say so. `unsent`: what
    is sent before a change of a column that is not of the replica identity; None for null."""

    schema: Schema
    encode: Encode
    unavailable: str | None
    unsent: str | None = None
    lake_type: pa.DataType = TEXT
    csv_type: pa.DataType | None = None

    def parse(self, texts: pa.Array) -> pa.Array:
        return self.encode(texts)


def debezium_column(
    published: PublishedColumn, table: TableName, choices: TableChoices, index: int
) -> DebeziumColumn:
    """Its `parser` is a DebeziumParser."""
    column, hide, choice = published.column, published.hide, published.choice(choices)
    is_text = choice.lake_type is not None and choice.lake_type.name == "string"
    found = _STRING if is_text else _type_of(column.pg_type, column.typmod)
    encode = found.encode if hide is None else lambda texts: found.encode(hide(texts))
    is_optional = not (column.is_key or column.not_null)
    schema = {"type": found.schema["type"], "optional": is_optional, **found.schema, "field": column.name}
    unsent = None if is_optional else _zero_of(found.schema)
    parser = DebeziumParser(schema, encode, _unavailable(found.schema), unsent)
    return DebeziumColumn(column, table, index, parser)


def _zero_of(schema: Schema) -> str:
    """What Debezium sends where the schema allows no null, and there is no value."""
    return _ZEROS.get(schema.get("name", ""), _ZEROS.get(schema["type"], "0"))


def _type_of(kind: PgType, typmod: int) -> _Type:
    if kind.kind == "d":
        # A domain has its base type's modifier as its own.
        kind = kind.without_domain
        typmod = kind.typmod
    if kind.kind == "e":
        allowed = ",".join(label for _, label in kind.labels)
        return _named("string", "io.debezium.data.Enum", debezium_types.strings, allowed=allowed)
    if kind.kind == "a" and not kind.extension and kind.oid not in _VECTORS:
        return _array_of(kind, typmod)
    if kind.extension:
        return _of_extension(kind)
    return _built_in(kind.oid, typmod)


def _array_of(kind: PgType, typmod: int) -> _Type:
    element = _type_of(kind.only_part, typmod)
    # Only labels are said to be always there.
    items = {"type": element.schema["type"], "optional": kind.only_part.kind != "e", **element.schema}
    return _Type(
        {"type": "array", "items": items}, debezium_types.arrays(element.encode, kind.only_part.delimiter)
    )


def _of_extension(kind: PgType) -> _Type:
    if kind.name == "hstore":
        return _named("string", "io.debezium.data.Json", debezium_types.hstores(kind))
    if kind.name == "ltree":
        return _named("string", "io.debezium.data.Ltree", debezium_types.strings)
    return _STRING


def _built_in(oid: int, typmod: int) -> _Type:
    if oid in _OF_TYPMOD:
        return _OF_TYPMOD[oid](typmod)
    return _PLAIN.get(oid, _STRING)


def _named(kind: str, name: str, encode: Encode, **parameters: str) -> _Type:
    schema: Schema = {"type": kind, "name": name, "version": 1}
    return _Type({**schema, "parameters": parameters} if parameters else schema, encode)


def _time(typmod: int) -> _Type:
    encode = debezium_types.times(typmod)
    if 0 <= typmod <= _SHORT:
        return _named("int32", "io.debezium.time.Time", encode)
    return _named("int64", "io.debezium.time.MicroTime", encode)


def _timestamp(typmod: int) -> _Type:
    name = "Timestamp" if 0 <= typmod <= _SHORT else "MicroTimestamp"
    return _named("int64", f"io.debezium.time.{name}", debezium_types.moments(typmod))


def _timestamptz(typmod: int) -> _Type:
    return _named("string", "io.debezium.time.ZonedTimestamp", debezium_types.zoned_moments(typmod))


def _numeric(typmod: int) -> _Type:
    if typmod >= 0:
        precision, scale = precision_and_scale(typmod)
        if scale >= 0:
            parameters = {"scale": str(scale), "connect.decimal.precision": str(precision)}
            return _named("bytes", _DECIMAL, debezium_types.decimals(scale), **parameters)
    fields = [
        {"type": "int32", "optional": False, "field": "scale"},
        {"type": "bytes", "optional": False, "field": "value"},
    ]
    return _struct(
        "io.debezium.data.VariableScaleDecimal",
        "Variable scaled decimal",
        fields,
        debezium_types.free_decimals,
    )


def _struct(name: str, doc: str, fields: list[Schema], encode: Encode) -> _Type:
    return _Type({"type": "struct", "fields": fields, "name": name, "version": 1, "doc": doc}, encode)


def _bit(typmod: int) -> _Type:
    if typmod == 1:
        return _Type({"type": "boolean"}, lambda texts: debezium_types.booleans(_as_letters(texts)))
    return _varbit(typmod)


def _varbit(typmod: int) -> _Type:
    length = typmod if typmod >= 0 else (1 << 31) - 1
    return _named("bytes", "io.debezium.data.Bits", debezium_types.bits, length=str(length))


def _as_letters(texts: pa.Array) -> pa.Array:
    return pa.array([None if one is None else "t" if one == "1" else "f" for one in texts.to_pylist()])


_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_STRING = _Type({"type": "string"}, debezium_types.strings)
_POINT_FIELDS = [
    {"type": "double", "optional": False, "field": "x"},
    {"type": "double", "optional": False, "field": "y"},
    {"type": "bytes", "optional": True, "field": "wkb"},
    {"type": "int32", "optional": True, "field": "srid"},
]
_PLAIN = {
    16: _Type({"type": "boolean"}, debezium_types.booleans),
    17: _Type({"type": "bytes"}, debezium_types.binaries),
    20: _Type({"type": "int64"}, debezium_types.integers),
    21: _Type({"type": "int16"}, debezium_types.integers),
    23: _Type({"type": "int32"}, debezium_types.integers),
    26: _Type({"type": "int64"}, debezium_types.integers),
    114: _named("string", "io.debezium.data.Json", debezium_types.strings),
    142: _named("string", "io.debezium.data.Xml", debezium_types.strings),
    600: _struct("io.debezium.data.geometry.Point", "Geometry (POINT)", _POINT_FIELDS, debezium_types.points),
    700: _Type({"type": "float"}, debezium_types.floats),
    701: _Type({"type": "double"}, debezium_types.floats),
    790: _Type(
        {"type": "bytes", "name": _DECIMAL, "version": 1, "parameters": {"scale": "2"}}, debezium_types.money
    ),
    1082: _named("int32", "io.debezium.time.Date", debezium_types.dates),
    1186: _named("int64", "io.debezium.time.MicroDuration", debezium_types.intervals),
    1266: _named("string", "io.debezium.time.ZonedTime", debezium_types.zoned_times),
    2950: _named("string", "io.debezium.data.Uuid", debezium_types.strings),
    3614: _named("string", "io.debezium.data.Tsvector", debezium_types.strings),
    3802: _named("string", "io.debezium.data.Json", debezium_types.strings),
}
"""By pg_type.oid. What is in none of these tables is a string."""
_OF_TYPMOD: dict[int, Callable[[int], _Type]] = {
    1083: _time,
    1114: _timestamp,
    1184: _timestamptz,
    1560: _bit,
    1562: _varbit,
    1700: _numeric,
}


def _unavailable(schema: Schema) -> str | None:
    """Debezium's placeholder, as far as its schema can hold it."""
    if schema["type"] == "string":
        return json.dumps(UNAVAILABLE)
    if schema["type"] == "bytes" and "name" not in schema:
        return json.dumps(base64.b64encode(UNAVAILABLE.encode()).decode())
    if schema["type"] == "array":
        items = schema["items"]
        if items["type"] in _INTEGERS:
            return json.dumps(list(UNAVAILABLE.encode()))
        one = _unavailable(items)
        return None if one is None else f"[{one}]"
    return None
