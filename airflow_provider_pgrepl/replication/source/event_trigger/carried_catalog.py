"""A table's catalog rows as a message carries them, and the relation that they make.

`relations.py` asks the catalog the same questions by the same texts, and makes its answers into a relation
by the same code; so what was carried equals what would have been read there and then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, cast

from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog import (
    missing,
    partitions,
    publication_membership,
    relations,
    types,
)
from airflow_provider_pgrepl.replication.source.connection import Connection

Rows = Mapping[str, list[list[Any]]]
"""The rows of each query, by the query's name."""


def carried_queries(server_version: int) -> dict[str, str]:
    """The texts of `relations.py`'s questions about one table, by name, for a server of this version."""
    by_version = server_version >= publication_membership.COLUMN_LISTS_SINCE
    queries = {
        "publication": publication_membership.PUBLICATION,
        "members": publication_membership.members_query(server_version),
        "tables": relations.TABLES,
        "columns": relations.COLUMNS,
        "keys": relations.KEYS,
        "leaves": partitions.LEAVES,
        "types": types.PARTS + types.TYPES,
        "fields": types.PARTS + types.FIELDS,
        "labels": types.LABELS,
        "missing": missing.MISSING,
    }
    return {**queries, "schemas": publication_membership.SCHEMA_MEMBERS} if by_version else queries


def carried_format(server_version: int) -> str:
    """Says which texts gave some rows: those of others are not understood."""
    texts = "\0".join(carried_queries(server_version).values())
    return hashlib.blake2b(texts.encode(), digest_size=6).hexdigest()


class _Carried:
    """Stands in for a connection: answers a query with the rows that were carried for its text."""

    def __init__(self, server_version: int, rows: Rows) -> None:
        self.server_version = server_version
        self._rows = {query: rows[name] for name, query in carried_queries(server_version).items()}
        self._found: list[tuple[Any, ...]] = []

    def cursor(self) -> _Carried:
        return self

    def __enter__(self) -> _Carried:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def execute(self, query: str, _: object = None) -> None:
        self._found = [tuple(row) for row in self._rows[query]]

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._found


def build_relation(oid: int, publication: str, server_version: int, rows: Rows) -> Relation | None:
    """The relation that these rows make; None when there was none. Raises LookupError or ValueError when they
    are not what the queries give."""
    connection = cast(Connection, _Carried(server_version, rows))
    return relations.read_relation(connection, oid, publication)
