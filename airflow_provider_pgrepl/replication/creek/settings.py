"""ConsumerSettings: which tables are kept in which, as a file says it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.creek.subjects import Version, Wire
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.text_file import read_text

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,39}")
_KNOWN = ("name", "tables", "namespace", "wire")
_EXAMPLE = 'as {"name": "copy", "tables": {"shop.public.orders": "public.orders"}}'


@dataclass(frozen=True)
class ConsumerSettings:
    """`tables`: of each database, by the name that its publisher gives it, its tables and where they go."""

    name: str
    tables: Mapping[str, Mapping[TableName, TableName]]
    namespace: str = "CREEK"
    wire: Version = "v2"

    @classmethod
    def read(cls, file: str | Path) -> ConsumerSettings:
        """Raises ConfigError naming the field."""
        text = read_text("consumer file", file)
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"the consumer file {file} is not JSON: {error}", _EXAMPLE) from None
        return cls.of(given)

    @classmethod
    def of(cls, given: Any) -> ConsumerSettings:
        """Raises ConfigError naming the field."""
        if not isinstance(given, dict):
            raise ConfigError("the consumer file must hold an object", _EXAMPLE)
        if unknown := sorted(set(given) - set(_KNOWN)):
            raise ConfigError(
                f"unknown key {', '.join(map(repr, unknown))}", hints.known_keys(unknown, _KNOWN)
            )
        name, namespace, wire = given.get("name"), given.get("namespace", "CREEK"), given.get("wire", "v2")
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigError("name: must be of a-z, 0-9 and _, at most 40 of them, and not begin with _")
        if wire not in get_args(Version):
            raise ConfigError(f"wire: {wire!r} must be one of {', '.join(map(repr, get_args(Version)))}")
        if not isinstance(namespace, str) or not namespace:
            raise ConfigError(f"namespace: {namespace!r} must be a string that is not empty")
        tables = given.get("tables")
        if not isinstance(tables, dict) or not tables:
            raise ConfigError("tables: must be an object that names a table at least", _EXAMPLE)
        return cls(name, _parsed(tables), namespace, wire)

    def stream(self, database: str) -> Wire:
        """How a database's streams are called."""
        return Wire(self.namespace, database, self.wire)


def _parsed(tables: Mapping[str, Any]) -> dict[str, dict[TableName, TableName]]:
    found: dict[str, dict[TableName, TableName]] = {}
    taken: set[TableName] = set()
    for source, target in tables.items():
        database, dot, rest = source.partition(".")
        try:
            into, of = TableName.parse(target), TableName.parse(rest)
        except (ValueError, TypeError, AttributeError):
            raise ConfigError(
                f"tables: {source!r}: {target!r} names no tables",
                "name the source as database.schema.table, and the target as schema.table",
            ) from None
        if not database or not dot or into in taken:
            raise ConfigError(
                f"tables: {source!r}: {target!r} names no database, or a target that another has",
                "each source has a target of its own",
            )
        taken.add(into)
        found.setdefault(database, {})[of] = into
    return found
