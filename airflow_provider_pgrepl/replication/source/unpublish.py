"""Tables leave a publication."""

from __future__ import annotations

from collections.abc import Iterable

import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.source.connection import Connection, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import execute_within, with_short_waits

_MEMBERS = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_publication p JOIN pg_catalog.pg_publication_rel m ON m.prpubid = p.oid
    JOIN pg_catalog.pg_class c ON c.oid = m.prrelid JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %s
"""

_NAMES = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::pg_catalog.oid[])
"""


def table_names(connection: Connection, oids: Iterable[int]) -> set[TableName]:
    """What relations are called now; nothing of those that are gone."""
    with source_errors("reading the names of tables"):
        return {TableName(*name) for name in rows(connection, _NAMES, (sorted(oids),))}


def drop_tables(
    connection: Connection, name: str, tables: Iterable[TableName], lock_timeout_s: float
) -> list[TableName]:
    """Take these tables out of the publication, in the order of their names; return those that were in it.

    Raises BusyError when a table is locked for longer than the timeout, and PrivilegeError: those before it
    are out then.
    """
    with source_errors(f"taking tables out of publication {name}"):
        members = {TableName(*member) for member in rows(connection, _MEMBERS, (name,))}
        leaving = sorted(members & set(tables))
        # One by one: whoever holds a lock while it waits for another may deadlock the application.
        for table in leaving:
            _drop(connection, name, table, lock_timeout_s)
    return leaving


def _drop(connection: Connection, name: str, table: TableName, lock_timeout_s: float) -> None:
    command = f"ALTER PUBLICATION {quote_identifier(name)} DROP TABLE ONLY {table.sql}"

    def attempt(wait_s: float) -> None:
        try:
            execute_within(connection, command, wait_s)
        except psycopg2.errors.LockNotAvailable:
            raise BusyError(
                f"{table}: not taken out of publication {name}, because a lock was not had within"
                f" {lock_timeout_s:g} s: another session alters or vacuums the table",
                "run the same again when that is done",
            ) from None

    with_short_waits(attempt, lock_timeout_s, BusyError)
