"""The publication: which tables' changes the slot's stream carries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl.errors import PublicationError
from airflow_provider_pgrepl.replication.relation import Relation, TableName, quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection, rows, source_errors
from airflow_provider_pgrepl.replication.source.relations import GENERATED_COLUMNS_SINCE

_PUBLICATION = """
SELECT oid::bigint, pubname::text, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
FROM pg_catalog.pg_publication WHERE pubname = %s
"""

_TABLES = "SELECT schemaname::text, tablename::text FROM pg_catalog.pg_publication_tables WHERE pubname = %s"


@dataclass(frozen=True)
class Publication:
    """A publication as the catalog has it; `tables` are those whose names the stream will carry."""

    oid: int
    name: str
    tables: frozenset[TableName]
    all_tables: bool
    insert: bool
    update: bool
    delete: bool
    truncate: bool
    via_root: bool


def read_identity(connection: Connection, name: str) -> tuple[int, bool] | None:
    """The oid of the publication that has this name, and whether it publishes changes of every kind; None
    when there is none. Waits for no lock on its tables, as reading what it publishes does."""
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _PUBLICATION, (name,))
    if not found:
        return None
    oid, _, _, insert, update, delete, truncate, _ = found[0]
    return oid, insert and update and delete and truncate


def read_publication(connection: Connection, name: str) -> Publication | None:
    """The publication of this name; None when there is none."""
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _PUBLICATION, (name,))
        tables = frozenset(TableName(*table) for table in rows(connection, _TABLES, (name,)))
    if not found:
        return None
    oid, pubname, all_tables, insert, update, delete, truncate, via_root = found[0]
    return Publication(oid, pubname, tables, all_tables, insert, update, delete, truncate, via_root)


def create_publication(connection: Connection, name: str, relations: Iterable[Relation]) -> None:
    """Publish all changes of these tables, those of partitions under their partitioned table's name, with
    stored generated columns where the server can.

    Raises PublicationError when the name is taken, PrivilegeError when a right is missing.
    """
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    if connection.server_version >= GENERATED_COLUMNS_SINCE:
        options += ", publish_generated_columns = stored"
    command = f"CREATE PUBLICATION {quote_identifier(name)} FOR TABLE {_listed(relations)} WITH ({options})"
    with source_errors(f"creating publication {name}"):
        try:
            _execute(connection, command)
        except psycopg2.errors.DuplicateObject:
            raise PublicationError(
                f"a publication named {name} exists already",
                "give the pipeline another publication name, or publication_mode: use to replicate what that"
                " one publishes",
            ) from None


def add_tables(connection: Connection, name: str, relations: Iterable[Relation]) -> None:
    """Add those that are not in it yet. Raises PublicationError when there is no such publication."""
    publication = read_publication(connection, name)
    if publication is None:
        raise PublicationError(f"there is no publication named {name}")
    missing = [relation for relation in relations if relation.table not in publication.tables]
    if missing:
        with source_errors(f"adding tables to publication {name}"):
            _execute(connection, f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {_listed(missing)}")


def drop_publication(connection: Connection, name: str) -> None:
    """Drop it; one that is not there is as good as dropped."""
    with source_errors(f"dropping publication {name}"):
        _execute(connection, f"DROP PUBLICATION IF EXISTS {quote_identifier(name)}")


def _listed(relations: Iterable[Relation]) -> str:
    # ONLY: a child by plain inheritance is a table of its own, and taken in when it is asked for.
    return ", ".join(f"ONLY {relation.table.sql}" for relation in relations)


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)
