"""A table's column in creek's form: the Avro type of its field, and the encoder of its text values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.errors import ValueRangeError, one_line
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions
from airflow_provider_pgrepl.replication.values.parser import UnsupportedValue
from airflow_provider_pgrepl.replication.values.scalars import precision_and_scale

from . import codec
from .codec import Encoded, Encoder, Schema

_DEFAULT_IDENTITY, _FULL_IDENTITY = "d", "f"
INFINITY = "infinity_modifier"
_SYMBOLS = ["infinity", "negative_infinity_ca5991f51367e3e4"]
INFINITIES = dict(zip(_SYMBOLS, ("infinity", "-infinity"), strict=True))
"""PostgreSQL's text of each symbol of the enum of infinities."""
_MOMENTS = {
    oids.DATE: ("date", "int", "date"),
    oids.TIMESTAMP: ("timestamp", "long", "timestamp-micros"),
    oids.TIMESTAMPTZ: ("timestamptz", "long", "timestamp-micros"),
}
_PLAIN: Mapping[int, tuple[str, Schema, Encoder]] = {
    oids.BOOL: ("bool", "boolean", codec.booleans),
    oids.CHAR: ("char", "string", codec.strings),
    oids.INT8: ("int8", "long", codec.integers),
    oids.INT2: ("int2", "int", codec.integers),
    oids.INT4: ("int4", "int", codec.integers),
    oids.TEXT: ("text", "string", codec.strings),
    oids.JSON: ("json", "bytes", codec.strings),
    oids.FLOAT4: ("float4", "float", codec.floats),
    oids.FLOAT8: ("float8", "double", codec.doubles),
    oids.BPCHAR: ("bpchar", "string", codec.strings),
    oids.VARCHAR: ("varchar", "string", codec.strings),
    oids.UUID: ("uuid", {"type": "string", "logicalType": "uuid"}, codec.strings),
    oids.JSONB: ("jsonb", "bytes", codec.strings),
}
_TEXT = _PLAIN[oids.TEXT]
_NO_NAME = re.compile(r"[^A-Za-z0-9_]")


@dataclass(frozen=True)
class _Type:
    """An Avro type of a column. `has_infinity`: the type is a union with the enum of infinities, which is the
    branch after the type's own. `encoder`: returns the encoder for the index of the type's own branch."""

    name: str
    schema: Schema
    encoder: Callable[[int], Encoder]
    has_infinity: bool = False


@dataclass(frozen=True)
class CreekColumn:
    """A column of a table, with its Avro type and encoder. `is_key`: the column belongs to the replica
    identity. `is_nullable`: its type is a union whose first branch is null."""

    name: str
    pg_type: str
    schema: Schema
    is_key: bool
    is_nullable: bool
    has_infinity: bool
    table: TableName
    encoder: Encoder

    def field(self, name: str, infinity: Schema) -> dict[str, Any]:
        """Return the column's field of a record. `name`: allowed by Avro. `infinity`: the enum of infinities,
        or its name where the schema has already defined it."""
        branches = [*(["null"] if self.is_nullable else []), *self._branches(infinity)]
        found: dict[str, Any] = {
            "name": name,
            "type": branches if len(branches) > 1 else branches[0],
            "pgKey": self.is_key,
            "pgType": self.pg_type,
        }
        if name != self.name:
            found["pgName"] = self.name
        return found

    def encode(self, texts: pa.Array) -> list[bytes]:
        """Encode text values. Raises ValueRangeError, which names the column and the table, but never the
        value."""
        try:
            return self._whole(self.encoder(texts))
        except UnsupportedValue as unholdable:
            reason, hint = unholdable.reason, unholdable.hint
        raise ValueRangeError(
            f'column "{one_line(self.name)}" of {self.table} holds a value that its Avro type cannot hold:'
            f" {reason}",
            hint,
        )

    def _whole(self, encoded: Encoded) -> list[bytes]:
        if self.is_nullable:
            return [b"\x00" if one is None else one for one in encoded]
        found = [one for one in encoded if one is not None]
        if len(found) < len(encoded):
            raise UnsupportedValue(
                "the value is NULL, and the column is in the key", "report it, with `pgrepl status`"
            )
        return found

    def _branches(self, infinity: Schema) -> list[Schema]:
        if isinstance(self.schema, dict) and self.schema["type"] == "array":
            item = self.schema["items"]
            return [{"type": "array", "items": [item, infinity] if self.has_infinity else item}]
        return [self.schema, infinity] if self.has_infinity else [self.schema]


def creek_column(
    column: Column,
    choice: ColumnOptions,
    hide: Callable[[pa.Array], pa.Array] | None,
    table: TableName,
    identity: str,
    *,
    is_of_identity: bool,
) -> CreekColumn:
    """Return the creek column of a table's column. `column`: under its name in the target. `choice`: if its
    lake type is `string`, the column is sent as text, whatever its type is. `hide`: replaces the text values
    before they are encoded. `identity`: the table's replica identity, as in pg_class.relreplident; with FULL
    (`f`) every column is a key column."""
    is_key = is_of_identity or identity == _FULL_IDENTITY
    is_nullable = not is_key or identity != _DEFAULT_IDENTITY
    is_text = choice.lake_type is not None and choice.lake_type.name == "string"
    found = _text() if is_text else _array_of(column) or _scalar(column.type_oid, column.typmod) or _text()
    plain = found.encoder(int(is_nullable))
    encoder = plain if hide is None else lambda texts: plain(hide(texts))
    return CreekColumn(
        column.name, found.name, found.schema, is_key, is_nullable, found.has_infinity, table, encoder
    )


def fields_of(named: Iterable[tuple[str, CreekColumn]], namespace: str) -> list[dict[str, Any]]:
    """Return the fields of a record. `named`: columns under names that Avro allows. The enum of infinities is
    defined in the first field that needs it. `namespace`: that of the enum's name, empty for none."""
    infinity, name = _infinity_enum(namespace)
    fields = []
    for field_name, column in named:
        fields.append(column.field(field_name, infinity))
        if column.has_infinity:
            infinity = name
    return fields


def _infinity_enum(namespace: str) -> tuple[Schema, str]:
    name = f"{namespace}.{INFINITY}" if namespace else INFINITY
    return {"name": name, "type": "enum", "symbols": _SYMBOLS}, name


def avro_name(name: str) -> str:
    """Return the name with each character that Avro does not allow replaced by `_` (Avro 1.12, "Names")."""
    found = _NO_NAME.sub("_", name)
    return found if found[:1].isalpha() or found.startswith("_") else f"_{found}"


def avro_names(columns: Iterable[CreekColumn]) -> list[str]:
    """Return a unique name for each column that Avro allows; a number is appended where two would be the
    same."""
    columns, found = list(columns), list[str]()
    taken = {column.name for column in columns}
    for column in columns:
        name, number = avro_name(column.name), 1
        while name != column.name and (name in taken or name in found):
            number += 1
            name = f"{avro_name(column.name)}_{number}"
        found.append(name)
    return found


def _text() -> _Type:
    name, schema, encoder = _TEXT
    return _Type(name, schema, _in_union(encoder))


def _scalar(oid: int, typmod: int) -> _Type | None:
    """Return the type of a scalar; None if creek does not know the type, which is then sent as text."""
    if oid in _PLAIN:
        name, schema, encoder = _PLAIN[oid]
        return _Type(name, schema, _in_union(encoder))
    if oid in _MOMENTS:
        name, kind, logical = _MOMENTS[oid]
        moment = {"type": kind, "logicalType": logical}
        return _Type(name, moment, lambda branch: codec.moments(oid, branch), has_infinity=True)
    if oid == oids.TIME:
        # creek's times also have the enum of infinities, although a time of day is never infinite.
        time = {"type": "long", "logicalType": "time-micros"}
        return _Type("time", time, lambda branch: codec.in_branch(codec.times, branch), has_infinity=True)
    return _numeric(typmod) if oid == oids.NUMERIC else None


def _numeric(typmod: int) -> _Type:
    """Return a decimal, or a string if the numeric has no precision, a negative scale, or a scale above its
    precision: creek cannot send the first, and Avro has no such decimals."""
    if typmod >= 0:
        precision, scale = precision_and_scale(typmod)
        if 0 <= scale <= precision:
            schema = {"type": "bytes", "logicalType": "decimal", "precision": precision}
            if scale:
                schema["scale"] = scale
            return _Type("numeric", schema, _in_union(codec.decimals(scale)))
    return _Type("numeric", "string", _in_union(codec.strings))


def _array_of(column: Column) -> _Type | None:
    kind = column.pg_type
    if kind.kind != "a" or kind.extension or kind.oid in oids.VECTORS:
        return None
    element = kind.only_part
    found = _scalar(element.oid, column.typmod)
    if found is None:
        return None
    encoder = codec.arrays(found.encoder(0) if found.has_infinity else found.encoder(-1), element.delimiter)
    schema = {"type": "array", "items": found.schema}
    return _Type(f"_{found.name}", schema, _in_union(encoder), has_infinity=found.has_infinity)


def _in_union(encoder: Encoder) -> Callable[[int], Encoder]:
    """Return a function from the index of a union's branch to the encoder. Below 1 there is no union."""
    return lambda branch: codec.in_branch(encoder, branch) if branch > 0 else encoder
