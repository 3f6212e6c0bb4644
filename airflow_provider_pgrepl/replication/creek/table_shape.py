"""TableShape: a table's columns as creek's schema has them, and the SQL that keeps a table of that shape."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from airflow_provider_pgrepl.errors import MessageError
from airflow_provider_pgrepl.replication.creek.messages import Row
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier

_SIZE = re.compile(r"\(\d+(,-?\d+)?\)")
_AVRO_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class ShapeColumn:
    """`field`: what messages call it. `pg_type`: SQL of its type."""

    field: str
    name: str
    pg_type: str
    is_key: bool
    is_nullable: bool


@dataclass(frozen=True)
class TableShape:
    """A version of a table. A table whose rows have no key is one that is sent whole before each change."""

    columns: Sequence[ShapeColumn]

    @classmethod
    def parse(cls, schema: str) -> TableShape:
        """Of a change's schema, or a snapshot's. Raises MessageError."""
        try:
            record = json.loads(schema)
            after = [field for field in record["fields"] if field["name"] == "after"]
            if record["name"] == "publish_message" and after:
                record = after[0]["type"][1]
            return cls(tuple(_column(field) for field in record["fields"]))
        except (ValueError, KeyError, TypeError, IndexError):
            raise MessageError("a schema is none of creek's") from None

    @cached_property
    def keys(self) -> list[ShapeColumn]:
        """Of a table that has a key: its columns. With replica identity full all are sent, and may be NULL;
        those of an index are some, which creek's schema lets be NULL as well."""
        keys = [column for column in self.columns if column.is_key]
        is_whole = len(keys) == len(self.columns) and all(column.is_nullable for column in keys)
        return [] if is_whole else keys

    def create_sql(self, table: TableName) -> str:
        """The table, if there is none of its name."""
        declared = [f"{quote_identifier(column.name)} {column.pg_type}" for column in self.columns]
        if self.keys:
            declared.append(f"PRIMARY KEY ({', '.join(quote_identifier(one.name) for one in self.keys)})")
        return f"CREATE TABLE IF NOT EXISTS {table.sql} ({', '.join(declared)})"

    def missing_sql(self, table: TableName, held: Iterable[str]) -> list[str]:
        """What adds the columns that a table does not have."""
        names = set(held)
        return [
            f"ALTER TABLE {table.sql} ADD COLUMN {quote_identifier(column.name)} {column.pg_type}"
            for column in self.columns
            if column.name not in names
        ]

    def insert_sql(self, table: TableName, types: Mapping[str, str], unchanged: Sequence[str] = ()) -> str:
        """A row, by its fields. Where there is one of its key it becomes that; fields in `unchanged` stay."""
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

    def move_sql(self, table: TableName, types: Mapping[str, str], unchanged: Sequence[str]) -> str:
        """The row with a key, whose parameters are those of `before_moving`, becomes another, with what
        stays."""
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
        """The row with a key; without one, a row that is equal."""
        if self.keys:
            where = " AND ".join(f"{_quoted(one.name)} = {_value(one, types)}" for one in self.keys)
            return f"DELETE FROM {_of(table)} WHERE {where}"  # noqa: S608 - names are quoted
        # As texts: some types have no equality.
        where = " AND ".join(
            f"{_quoted(one.name)}::text IS NOT DISTINCT FROM {_value(one, types)}::text"
            for one in self.columns
        )
        found = f"SELECT ctid FROM {_of(table)} WHERE {where} LIMIT 1"  # noqa: S608 - names are quoted
        return f"DELETE FROM {_of(table)} WHERE ctid = ({found})"  # noqa: S608 - names are quoted


def before_moving(key: Row) -> Row:
    """A key's values, by names that no field has."""
    return {_before(field): value for field, value in key.items()}


def _before(field: str) -> str:
    return f"before {field}"


def _value(column: ShapeColumn, types: Mapping[str, str]) -> str:
    pg_type = types.get(column.name, column.pg_type).replace("%", "%%")
    # In brackets: a minus sign is weaker than the cast. Without the size: a cast cuts what is too long.
    return f"(%({column.field})s)::{unsized(pg_type)}"


def unsized(pg_type: str) -> str:
    """SQL of a type without its length or precision."""
    return _SIZE.sub("", pg_type)


def _quoted(name: str) -> str:
    """In a statement with parameters."""
    return quote_identifier(name).replace("%", "%%")


def _of(table: TableName) -> str:
    return table.sql.replace("%", "%%")


def _column(field: Mapping[str, Any]) -> ShapeColumn:
    if not _AVRO_NAME.fullmatch(field["name"]):
        # It becomes the name of a parameter.
        raise ValueError(field["name"])
    branches = field["type"] if isinstance(field["type"], list) else [field["type"]]
    named = quote_identifier(str(field["pgType"]))
    sized = [one for one in branches if isinstance(one, dict) and one.get("logicalType") == "decimal"]
    size = f"({int(sized[0]['precision'])},{int(sized[0].get('scale', 0))})" if sized else ""
    return ShapeColumn(
        str(field["name"]),
        str(field.get("pgName", field["name"])),
        f"pg_catalog.{named}{size}",
        bool(field["pgKey"]),
        "null" in branches,
    )
