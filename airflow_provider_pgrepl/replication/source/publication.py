"""The publication: which tables' changes the slot's stream carries."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl.errors import PgReplError, PublicationError, SnapshotError
from airflow_provider_pgrepl.replication.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source import time_limit
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    COLUMN_LISTS_SINCE,
    GENERATED_COLUMNS_SINCE,
)
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect,
    rows,
    source_errors,
)
from airflow_provider_pgrepl.replication.source.copy.table_locks import lock_tables
from airflow_provider_pgrepl.replication.source.short_waits import execute_within, with_short_waits
from airflow_provider_pgrepl.replication.source.unpublish import drop_tables

log = logging.getLogger(__name__)

_PUBLICATION = """
SELECT oid::bigint, pubname::text, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
FROM pg_catalog.pg_publication WHERE pubname = %s
"""

# pg_publication_tables waits for locks on the tables; these are plain reads of the catalog.
_TABLES = """
WITH RECURSIVE publication AS (SELECT * FROM pg_catalog.pg_publication WHERE pubname = %s),
member (oid) AS (
    SELECT c.oid FROM publication p, pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n
        ON n.oid = c.relnamespace
    WHERE p.puballtables AND c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND c.oid >= 16384
        AND n.nspname NOT IN ('information_schema', '_pgrepl')
    UNION
    SELECT m.prrelid FROM publication p JOIN pg_catalog.pg_publication_rel m ON m.prpubid = p.oid
    {schemas}
),
below (oid, member) AS (
    SELECT oid, oid FROM member
    UNION
    SELECT i.inhrelid, below.member
    FROM below JOIN pg_catalog.pg_class c ON c.oid = below.oid AND c.relkind = 'p'
        JOIN pg_catalog.pg_inherits i ON i.inhparent = below.oid
)
SELECT DISTINCT n.nspname::text, c.relname::text
FROM publication p, below b JOIN pg_catalog.pg_class c ON c.oid = b.oid
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE CASE WHEN p.pubviaroot THEN NOT EXISTS (SELECT FROM below o WHERE o.oid = b.oid AND o.member <> b.oid)
    ELSE c.relkind = 'r' END
"""

_SCHEMA_MEMBERS = """UNION
    SELECT c.oid FROM publication p JOIN pg_catalog.pg_publication_namespace m ON m.pnpubid = p.oid
        JOIN pg_catalog.pg_class c ON c.relnamespace = m.pnnspid
    WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p'"""


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
    """The publication of this name; None when there is none. Waits for no lock."""
    by_schema = _SCHEMA_MEMBERS if connection.server_version >= COLUMN_LISTS_SINCE else ""
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _PUBLICATION, (name,))
        listed = rows(connection, _TABLES.replace("{schemas}", by_schema), (name,))
    tables = frozenset(TableName(*table) for table in listed)
    if not found:
        return None
    oid, pubname, all_tables, insert, update, delete, truncate, via_root = found[0]
    return Publication(oid, pubname, tables, all_tables, insert, update, delete, truncate, via_root)


_MAKER = """
SELECT p.oid::bigint, r.rolname::text, pg_catalog.obj_description(p.oid, 'pg_publication')
FROM pg_catalog.pg_publication p LEFT JOIN pg_catalog.pg_roles r ON r.oid = p.pubowner WHERE p.pubname = %s
"""


def reason_to_keep(connection: Connection, name: str, pipeline: str, known_oid: int | None) -> str | None:
    """Return why a publication of this name must stay; None if this pipeline made it, or there is none.

    It is the pipeline's if it has `known_oid`, that of the lake's epoch, or the comment that
    `create_publication` gives it: both are lost when another role drops it and creates one of its name.
    """
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _MAKER, (name,))
    if not found:
        return None
    oid, owner, comment = found[0]
    if oid == known_oid or comment == _comment(pipeline):
        return None
    return f"role {owner} owns it, and neither its oid nor its comment is that of pipeline {pipeline}"


def _comment(pipeline: str) -> str:
    return f"made by airflow-provider-pgrepl for pipeline {pipeline}"


def create_publication(
    connection: Connection,
    name: str,
    relations: Iterable[Relation],
    lock_timeout_s: float = 10.0,
    *,
    made_for: str | None = None,
) -> None:
    """Publish all changes of these tables, those of partitions under their partitioned table's name, with
    stored generated columns where the server can.

    `made_for`: the pipeline, which the publication's comment then names. Raises PublicationError when the
    name is taken, PrivilegeError when a right is missing, SnapshotError when a lock was not had in time, as
    while a table is altered or vacuumed.
    """
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    if connection.server_version >= GENERATED_COLUMNS_SINCE:
        options += ", publish_generated_columns = stored"
    command = f"CREATE PUBLICATION {quote_identifier(name)} FOR TABLE {_listed(relations)} WITH ({options})"
    if made_for is not None:
        command += f"; COMMENT ON PUBLICATION {quote_identifier(name)} IS '{_comment(made_for)}'"

    def attempt(wait_s: float) -> None:
        try:
            execute_within(connection, command, wait_s)
        except psycopg2.errors.LockNotAvailable:
            raise SnapshotError(
                f"publication {name} was not created, because a lock on one of its tables was not had:"
                " another session alters or vacuums it",
                "try again when that is done, or raise lock_timeout_s",
            ) from None

    with source_errors(f"creating publication {name}"):
        try:
            with_short_waits(attempt, lock_timeout_s)
        except psycopg2.errors.DuplicateObject:
            raise PublicationError(
                f"a publication named {name} exists already",
                "give the pipeline another publication name, or publication_mode: use to replicate what that"
                " one publishes",
            ) from None


def add_tables(dsn: str, name: str, relations: Iterable[Relation], lock_timeout_s: float) -> list[Relation]:
    """Add those that are not in it yet; says which these were. Each joins between two of its writers.

    In one transaction a table is locked against writers, and the publication altered: whether the changes of
    a transaction that has begun to write it before are sent would be left to chance. Raises SnapshotError
    when a lock is not had in time; PublicationError when there is no such publication; PrivilegeError. The
    publication is then as it was.
    """
    connection = connect(dsn, f"publish {name}")
    added: list[Relation] = []
    try:
        publication = read_publication(connection, name)
        if publication is None:
            raise PublicationError(f"there is no publication named {name}")
        for relation in relations:
            if relation.table not in publication.tables:
                added.append(relation)
                # One by one: who holds a lock while it waits for another may deadlock the application.
                _add(connection, dsn, name, relation, lock_timeout_s)
        return added
    except BaseException as error:
        connection.close()
        # Of the last one the outcome is not known when the connection was lost.
        left = added[:-1] if isinstance(error, SnapshotError) else added
        _take_out(dsn, name, [relation.table for relation in left], lock_timeout_s)
        raise
    finally:
        connection.close()


def _take_out(dsn: str, name: str, tables: list[TableName], lock_timeout_s: float) -> None:
    """Over another connection: the first may be lost, or in a transaction that failed. Does not raise."""
    if not tables:
        return
    try:
        with closing(connect(dsn, f"publish {name}")) as connection:
            drop_tables(connection, name, tables, lock_timeout_s)
    except PgReplError as error:
        log.warning("%s: stay in publication %s: %s", ", ".join(map(str, tables)), name, error)


def _add(connection: Connection, dsn: str, name: str, relation: Relation, lock_timeout_s: float) -> None:
    def attempt(wait_s: float) -> None:
        try:
            _try_to_add(connection, dsn, name, relation, wait_s, lock_timeout_s)
        except SnapshotError:
            with source_errors(f"adding {relation.table} to publication {name}"):
                _execute(connection, "ROLLBACK")
            raise

    # Writers that come while the lock is waited for wait behind it.
    with_short_waits(attempt, lock_timeout_s)


def _try_to_add(
    connection: Connection, dsn: str, name: str, relation: Relation, wait_s: float, lock_timeout_s: float
) -> None:
    with source_errors(f"adding {relation.table} to publication {name}"):
        _execute(connection, "BEGIN")
        lock_tables(connection, dsn, [relation], "SHARE ROW EXCLUSIVE", wait_s, lock_timeout_s)
        try:
            command = f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {_listed([relation])}"
            with time_limit.patience(connection, wait_s + time_limit.ANSWER_LIMIT_S):
                _execute(connection, command)
            _execute(connection, "COMMIT")
        except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DuplicateObject):
            raise SnapshotError(
                f"publication {name} is being altered by somebody else at the same time", "try again"
            ) from None


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
