"""The columns of a table in creek's schema, and the SQL that maintains a copy of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from airflow_provider_pgrepl.errors import MessageError
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier

from .messages import Row

_SIZE = re.compile(r"\(\d+(,-?\d+)?\)")
_INTEGERS = frozenset({"smallint", "integer", "bigint", "int2", "int4", "int8"})
_FLOATS = frozenset({"real", "double precision", "float4", "float8"})
_MOMENTS = ("timestamp", "time")
_SIZED = re.compile(r"(?P<name>[a-z0-9 _\"]+?)(\((?P<first>\d+)(,(?P<second>-?\d+))?\))?(?P<zone> with.*)?")
_SHORT = {"decimal": "numeric", "timestamp without time zone": "timestamp"}
_UNLIMITED = {"character": "pg_catalog.bpchar", "bit": 'pg_catalog."bit"'}
"""Types that have the length 1 if none is given, each under a name with which it has no limit."""
_AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ShapeColumn:
    """A column. `field`: its name in messages. `pg_type`: the SQL of its type."""

    field: str
    name: str
    pg_type: str
    is_key: bool
    is_nullable: bool


@dataclass(frozen=True)
class TableShape:
    """The columns of one version of a table. Without key columns, each change has the whole earlier row."""

    columns: Sequence[ShapeColumn]

    @classmethod
    def parse(cls, schema: str) -> TableShape:
        """Parse the schema of a change or of a snapshot. Raises MessageError."""
        try:
            record = json.loads(schema)
            after = [field for field in record["fields"] if field["name"] == "after"]
            if record["name"] == "publish_message" and after:
                record = after[0]["type"][1]
            return cls(tuple(_column(field) for field in record["fields"]))
        except (ValueError, KeyError, TypeError, IndexError):
            raise MessageError("the schema of a message is not in creek's format") from None

    @cached_property
    def keys(self) -> list[ShapeColumn]:
        """Return the key columns, or no column if the table has no key.

        With REPLICA IDENTITY FULL, creek's schema marks every column as a nullable key column: then there is
        no key. Columns of an index are nullable in that schema as well: an index of all columns looks the
        same, and counts as no key.
        """
        keys = [column for column in self.columns if column.is_key]
        is_whole = len(keys) == len(self.columns) and all(column.is_nullable for column in keys)
        return [] if is_whole else keys

    def create_sql(self, table: TableName) -> str:
        """Return the statement that creates the table if no table of its name exists."""
        declared = [f"{quote_identifier(column.name)} {column.pg_type}" for column in self.columns]
        if self.keys:
            declared.append(f"PRIMARY KEY ({', '.join(quote_identifier(one.name) for one in self.keys)})")
        return f"CREATE TABLE IF NOT EXISTS {table.sql} ({', '.join(declared)})"

    def missing_sql(self, table: TableName, existing: Iterable[str]) -> list[str]:
        """Return the statements that add the columns that the table lacks."""
        names = set(existing)
        return [
            f"ALTER TABLE {table.sql} ADD COLUMN {quote_identifier(column.name)} {column.pg_type}"
            for column in self.columns
            if column.name not in names
        ]

    def insert_sql(self, table: TableName, types: Mapping[str, str], unchanged: Sequence[str] = ()) -> str:
        """Return the statement that inserts a row. If the table has a row with its key, that row is updated
        instead, except for the fields in `unchanged`."""
        names = ", ".join(_quoted(column.name) for column in self.columns)
        values = ", ".join(_value(column, types) for column in self.columns)
        insert = f"INSERT INTO {_of(table)} ({names}) VALUES ({values})"  # noqa: S608 - names are quoted
        if not self.keys:
            return insert
        kept = {column.name for column in self.keys}
        kept |= {column.name for column in self.columns if column.field in unchanged}
        sets = [
            f"{quoted} = excluded.{quoted}"
            for quoted in (_quoted(one.name) for one in self.columns if one.name not in kept)
        ]
        keys = ", ".join(_quoted(column.name) for column in self.keys)
        then = f"UPDATE SET {', '.join(sets)}" if sets else "NOTHING"
        return f"{insert} ON CONFLICT ({keys}) DO {then}"

    def update_key_sql(self, table: TableName, types: Mapping[str, str], unchanged: Sequence[str]) -> str:
        """Return the statement that updates the row with an earlier key, including its key, except for the
        fields in `unchanged`. The parameters of the earlier key are those of `earlier_key`."""
        sets = ", ".join(
            f"{_quoted(one.name)} = {_value(one, types)}"
            for one in self.columns
            if one.field not in unchanged
        )
        where = " AND ".join(
            f"{_quoted(one.name)} = {_value(replace(one, field=_before(one.field)), types)}"
            for one in self.keys
        )
        return f"UPDATE {_of(table)} SET {sets} WHERE {where}"  # noqa: S608 - names are quoted

    def delete_sql(self, table: TableName, types: Mapping[str, str]) -> str:
        """Return the statement that deletes the row with a key. Without a key, it deletes one equal row."""
        if self.keys:
            where = " AND ".join(f"{_quoted(one.name)} = {_value(one, types)}" for one in self.keys)
            return f"DELETE FROM {_of(table)} WHERE {where}"  # noqa: S608 - names are quoted
        # Compare text values: some types have no equality operator.
        where = " AND ".join(
            f"{_quoted(one.name)}::text IS NOT DISTINCT FROM {_value(one, types)}::text"
            for one in self.columns
        )
        # A row of another partition may have the same ctid.
        found = f"SELECT tableoid, ctid FROM {_of(table)} WHERE {where} LIMIT 1"  # noqa: S608 - names are quoted
        return f"DELETE FROM {_of(table)} WHERE (tableoid, ctid) = ({found})"  # noqa: S608 - names are quoted


def earlier_key(key: Row) -> Row:
    """Return the values of a key under parameter names that no field has."""
    return {_before(field): value for field, value in key.items()}


def _before(field: str) -> str:
    return f"before {field}"


def _value(column: ShapeColumn, types: Mapping[str, str]) -> str:
    pg_type = types.get(column.name, column.pg_type).replace("%", "%%")
    # In parentheses: the cast binds more strongly than a minus sign. Without the size: a cast would truncate.
    return f"(%({column.field})s)::{unsized(pg_type)}"


def unsized(pg_type: str) -> str:
    """Return the SQL of a type without its length or precision."""
    name = _SIZE.sub("", pg_type)
    element = name.removesuffix("[]")
    return _UNLIMITED.get(element, element) + name[len(element) :]


def keeps_less(source: str, target: str) -> bool:
    """Return True if a column of type `target` may lose part of a value of type `source`. Both are SQL:
    `pg_catalog."numeric"(10,2)`, `timestamp(0) with time zone`."""
    (name, size, scale, zone), (of, limit, to, to_zone) = _parts(source), _parts(target)
    if of in _INTEGERS:
        return name == "numeric" or name in _FLOATS
    if of == "numeric" and limit is not None:
        return name in _FLOATS or (name == "numeric" and (scale is None or (to or 0) < scale))
    if of in ("real", "float4"):
        return name == "numeric" or name in ("double precision", "float8")
    if of in ("double precision", "float8"):
        return name == "numeric"
    if of == "date":
        return name.startswith("timestamp")
    if of.startswith(_MOMENTS):
        is_moment = name.startswith(_MOMENTS)
        return is_moment and ((limit is not None and size is None) or of[:5] != name[:5] or zone != to_zone)
    return False


def _parts(text: str) -> tuple[str, int | None, int | None, bool]:
    """Return a type's name, its length or precision, its scale, and True if the type has a time zone. Those
    of an array are its elements'."""
    element = text.replace("pg_catalog.", "").replace('"', "").lower().removeprefix("_").removesuffix("[]")
    found = _SIZED.fullmatch(element)
    if found is None:
        return text, None, None, False
    first, second = (None if found[key] is None else int(found[key]) for key in ("first", "second"))
    name = found["name"]
    has_zone = name.endswith("tz") or (found["zone"] or "").startswith(" with time zone")
    scale = (second or 0) if first is not None else None
    return _SHORT.get(name, name).removesuffix("tz"), first, scale, has_zone


def _quoted(name: str) -> str:
    """Quote a name for a statement with parameters."""
    return quote_identifier(name).replace("%", "%%")


def _of(table: TableName) -> str:
    return table.sql.replace("%", "%%")


def _column(field: Mapping[str, Any]) -> ShapeColumn:
    if not _AVRO_NAME.fullmatch(field["name"]):
        # The name becomes that of a parameter.
        raise ValueError(field["name"])
    branches = field["type"] if isinstance(field["type"], list) else [field["type"]]
    named = quote_identifier(str(field["pgType"]))
    elements = [one.get("items", one) for one in branches if isinstance(one, dict)]
    sized = [one for one in elements if isinstance(one, dict) and one.get("logicalType") == "decimal"]
    size = f"({int(sized[0]['precision'])},{int(sized[0].get('scale', 0))})" if sized else ""
    return ShapeColumn(
        str(field["name"]),
        str(field.get("pgName", field["name"])),
        f"pg_catalog.{named}{size}",
        bool(field["pgKey"]),
        "null" in branches,
    )
