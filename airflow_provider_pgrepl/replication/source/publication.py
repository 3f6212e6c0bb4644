"""The publication, which determines the tables whose changes the stream carries."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial

import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError, PgReplError, PublicationError, SnapshotError
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Partition, PublicationStatus, Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, leaves_of, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    ABOVE,
    COLUMN_LISTS_SINCE,
    GENERATED_COLUMNS_SINCE,
    find_tables,
    memberships,
)
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import Mode, lock_command, lock_errors

from .connection import Connection, connect, rows
from .server_errors import source_errors
from .short_waits import SHORT_WAIT_S, execute_together, execute_within, with_short_waits

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
log = logging.getLogger(__name__)
_PUBLICATION = """
SELECT oid::bigint, pubname::text, puballtables, pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot
FROM pg_catalog.pg_publication WHERE pubname = %s
"""
# These are plain reads of the catalog: pg_publication_tables waits for locks on the tables.
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
_PARTITIONED = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'p'
"""
_MAKER = """
SELECT p.oid::bigint, r.rolname::text, pg_catalog.obj_description(p.oid, 'pg_publication')
FROM pg_catalog.pg_publication p LEFT JOIN pg_catalog.pg_roles r ON r.oid = p.pubowner WHERE p.pubname = %s
"""
# Fails with undefined_table if another table has the name by now. Run it while that table is locked.
_IS_SELECTED = """
SELECT (CASE WHEN pg_catalog.to_regclass(%s)::pg_catalog.oid = %s THEN 'pg_catalog.pg_class'
    ELSE 'pg_catalog.another_table' END)::pg_catalog.regclass
"""
_AT_ONCE = "SHARE UPDATE EXCLUSIVE"
# CREATE PUBLICATION waits for another transaction that creates one of the same name. The lock timeout limits
# that wait to the remaining time. The statement itself may take longer with many tables.
_NAME_WAIT = (
    "SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('statement_timeout'), true)"
)
_DROP_WAIT_S = 0.01
# A catalog row that is altered or recreated gets another xmin; one that is frozen or moved keeps it.
_PUBLISHED = """{above}
SELECT p.oid::bigint, p.xmin::text,
    (SELECT pg_catalog.string_agg(m.oid::text || ' ' || m.xmin::text, ',' ORDER BY m.oid)
     FROM pg_catalog.pg_publication_rel m WHERE m.prpubid = p.oid),
    {schemas},
    (SELECT pg_catalog.string_agg(known.oid::text, ',' ORDER BY known.oid)
     FROM pg_catalog.unnest(%(oids)s::bigint[]) AS known (oid)
     WHERE NOT EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.oid = known.oid)),
    (SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', c.oid, c.relnamespace, c.relname), ','
                                  ORDER BY c.oid)
     FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])),
    (SELECT pg_catalog.string_agg(i.inhrelid::text || ' ' || i.xmin::text, ','
                                  ORDER BY i.inhrelid, i.inhparent)
     FROM pg_catalog.pg_inherits i WHERE i.inhrelid IN (SELECT above.published FROM above))
FROM pg_catalog.pg_publication p WHERE p.pubname = %(publication)s
"""
_BY_SCHEMA = """
    (SELECT pg_catalog.string_agg(m.oid::text || ' ' || d.objid::text || ' ' || d.xmin::text, ','
                                  ORDER BY m.oid, d.objid)
     FROM pg_catalog.pg_publication_namespace m LEFT JOIN pg_catalog.pg_depend d
         ON d.classid = 'pg_catalog.pg_class'::pg_catalog.regclass
         AND d.objid IN (SELECT above.published FROM above)
         AND d.objsubid = 0 AND d.refclassid = 'pg_catalog.pg_namespace'::pg_catalog.regclass
     WHERE m.pnpubid = p.oid)"""
# The links from a table to its partitions, and whether each is logged. Unlogged tables send no changes, and
# only a table that the publication lists cannot be made unlogged.
_PLACES = """
WITH RECURSIVE below (oid, relkind, relpersistence, parent, link) AS (
    SELECT c.oid, c.relkind, c.relpersistence, '0'::oid, '0'::xid
    FROM pg_catalog.pg_class c WHERE c.oid = ANY (%(oids)s::oid[])
    UNION ALL
    SELECT c.oid, c.relkind, c.relpersistence, i.inhparent, i.xmin
    FROM below JOIN pg_catalog.pg_inherits i ON below.relkind = 'p' AND i.inhparent = below.oid
        JOIN pg_catalog.pg_class c ON c.oid = i.inhrelid
)
SELECT pg_catalog.string_agg(pg_catalog.concat_ws(' ', oid, parent, link, relkind, relpersistence), ','
                             ORDER BY oid, parent) FROM below
"""
_PRESENT = """
SELECT c.oid::bigint, c.relkind::text, c.relpersistence::text, n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%(oids)s::oid[])
"""
Names = Callable[[int], Collection[TableName]]
"""Returns the names that a relation (oid) has had."""


def table_names(connection: Connection, oids: Iterable[int]) -> set[TableName]:
    """Return the current names of relations, without those that no longer exist."""
    with source_errors("reading the names of tables"):
        return {TableName(*name) for name in rows(connection, _NAMES, (sorted(oids),))}


def drop_tables(
    connection: Connection, name: str, tables: Iterable[TableName], lock_timeout_s: float
) -> list[TableName]:
    """Remove these tables from the publication, in order of their names, and return those that were in it.

    Raises BusyError if a table is locked for longer than `lock_timeout_s`, and PrivilegeError. The tables
    before it are removed then.
    """
    with source_errors(f"taking tables out of publication {name}"):
        members = {TableName(*member) for member in rows(connection, _MEMBERS, (name,))}
        leaving = sorted(members & set(tables))
        # Remove one table per transaction: holding the lock of one while waiting for the next could deadlock
        # with the application's transactions.
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


@dataclass(frozen=True)
class Publication:
    """A publication, as the source's catalog has it.

    :param oid: the OID in pg_publication
    :param name: the name
    :param tables: the tables under whose names the stream carries changes
    :param all_tables: True for FOR ALL TABLES
    :param insert: True if inserts are published
    :param update: True if updates are published
    :param delete: True if deletes are published
    :param truncate: True if truncates are published
    :param via_root: `publish_via_partition_root`: changes of partitions have the partitioned table's name
    """

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
    """Return the oid of the publication, and True if it publishes changes of every kind; None without it.

    Does not wait for table locks.
    """
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _PUBLICATION, (name,))
    if not found:
        return None
    oid, _, _, insert, update, delete, truncate, _ = found[0]
    return oid, insert and update and delete and truncate


def read_publication(connection: Connection, name: str) -> Publication | None:
    """Return the publication of this name, or None if there is none. Does not wait for locks."""
    by_schema = _SCHEMA_MEMBERS if connection.server_version >= COLUMN_LISTS_SINCE else ""
    with source_errors(f"reading publication {name}"):
        found = rows(connection, _PUBLICATION, (name,))
        listed = rows(connection, _TABLES.replace("{schemas}", by_schema), (name,))
    tables = frozenset(TableName(*table) for table in listed)
    if not found:
        return None
    oid, pubname, all_tables, insert, update, delete, truncate, via_root = found[0]
    return Publication(oid, pubname, tables, all_tables, insert, update, delete, truncate, via_root)


def reason_to_keep(connection: Connection, name: str, pipeline: str, known_oid: int | None) -> str | None:
    """Return why a publication must not be dropped; None if this pipeline created it, or it does not exist.

    It is the pipeline's if it has `known_oid`, from the lake's epoch, or the comment that
    `create_publication` sets. A publication that another role recreates under this name has neither.
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
    """Create a publication of all changes of these tables.

    Changes of partitions have the name of their partitioned table. Stored generated columns are published if
    the server can. `made_for`: the pipeline that the publication's comment names. Raises PublicationError if
    the name is taken, PrivilegeError if a privilege is missing. Raises SnapshotError if a table's lock is not
    acquired within `lock_timeout_s` seconds, as while it is altered or vacuumed, or if another table has its
    name by now. If adding a table fails, the publication is dropped again.
    """
    options = _options(connection)
    commands = [f"CREATE PUBLICATION {quote_identifier(name)} WITH ({options})"]
    if made_for is not None:
        commands.append(f"COMMENT ON PUBLICATION {quote_identifier(name)} IS '{_comment(made_for)}'")
    with source_errors(f"creating publication {name}"):
        try:
            _execute(connection, "; ".join(commands))
        except psycopg2.errors.DuplicateObject:
            raise PublicationError(
                f"a publication named {name} exists already",
                "give the pipeline another publication name, or publication_mode: use to replicate what that"
                " one publishes",
            ) from None
        try:
            # Add one table per transaction: holding the lock of one while waiting for the next could deadlock
            # with the application's transactions.
            for relation in relations:
                with_short_waits(partial(_publish, connection, name, relation), lock_timeout_s)
        except BaseException:
            _drop_again(connection, name)
            raise


def _options(connection: Connection) -> str:
    options = "publish = 'insert, update, delete, truncate', publish_via_partition_root = true"
    if connection.server_version >= GENERATED_COLUMNS_SINCE:
        options += ", publish_generated_columns = stored"
    return options


def _drop_again(connection: Connection, name: str) -> None:
    try:
        drop_publication(connection, name)
    except PgReplError as error:
        log.warning(
            "publication %s was created without all its tables, and could not be dropped: %s", name, error
        )


def _publish(connection: Connection, name: str, relation: Relation, wait_s: float) -> None:
    try:
        execute_within(connection, "; ".join(_addition(connection, name, relation)), wait_s)
    except psycopg2.errors.UndefinedTable:
        raise _replaced(relation) from None
    except psycopg2.errors.LockNotAvailable:
        raise SnapshotError(
            f"publication {name} was not created, because a lock on {relation.table} was not had: another"
            " session alters or vacuums it",
            "run the command again when these sessions have ended, or raise lock_timeout_s",
        ) from None


def add_tables(dsn: str, name: str, relations: Iterable[Relation], lock_timeout_s: float) -> list[Relation]:
    """Add the tables that the publication lacks, and return them.

    Each table is added in a transaction that locks it against writers. Otherwise it would be left to chance
    whether the changes of a transaction that is writing the table are sent. Raises SnapshotError if a lock is
    not acquired in time, or another table has the name by now, PublicationError if the publication does not
    exist, PrivilegeError. After an error, the added tables are removed again.
    """
    connection = connect(dsn, f"publish {name}")
    added: list[Relation] = []
    try:
        publication = read_publication(connection, name)
        if publication is None:
            raise PublicationError(f"there is no publication named {name}")
        for relation in relations:
            if relation.source_table not in publication.tables:
                added.append(relation)
                # Add one table per transaction: holding the lock of one while waiting for the next could
                # deadlock with the application's transactions.
                _add(connection, dsn, name, relation, lock_timeout_s)
        return added
    except BaseException as error:
        connection.close()
        # If the connection was lost, the last table may have been added or not.
        left = added[:-1] if isinstance(error, SnapshotError) else added
        _take_out(dsn, name, left, lock_timeout_s)
        raise
    finally:
        connection.close()


def _take_out(dsn: str, name: str, added: Sequence[Relation], lock_timeout_s: float) -> None:
    """Remove tables over a new connection: the first may be lost, or in a failed transaction.

    Logs PgReplError and does not raise it.
    """
    if not added:
        return
    try:
        with closing(connect(dsn, f"publish {name}")) as connection:
            oids = [relation.oid for relation in added]
            drop_tables(connection, name, table_names(connection, oids), lock_timeout_s)
    except PgReplError as error:
        tables = ", ".join(relation.source_table.sql for relation in added)
        log.warning(
            "publication %s may still contain tables that were not copied: %s (%s). Until they are removed,"
            " the server sends their changes: %s",
            *(name, tables, error),
            f"as its owner, run ALTER PUBLICATION {quote_identifier(name)} DROP TABLE {tables}",
        )


def _add(connection: Connection, dsn: str, name: str, relation: Relation, lock_timeout_s: float) -> None:
    mode: Mode = "SHARE ROW EXCLUSIVE"
    commands = [lock_command([relation], mode), *_addition(connection, name, relation)]

    def attempt(wait_s: float) -> None:
        with (
            source_errors(f"adding {relation.table} to publication {name}"),
            lock_errors(connection, dsn, [relation], mode, lock_timeout_s),
        ):
            if wait_s > SHORT_WAIT_S:
                _end_autovacuum(connection, relation, wait_s)
            try:
                execute_together(connection, commands, min(wait_s, SHORT_WAIT_S))
            except psycopg2.errors.UndefinedTable:
                raise _replaced(relation) from None
            except psycopg2.errors.DuplicateObject:
                raise SnapshotError(
                    f"publication {name} is being altered by another session at the same time", "try again"
                ) from None

    # New writers queue behind the wait for this lock, so keep it short.
    with_short_waits(attempt, lock_timeout_s)


def _end_autovacuum(connection: Connection, relation: Relation, wait_s: float) -> None:
    """Lock each leaf in its own transaction, so that the server cancels an autovacuum that holds its lock.

    The lock mode does not block writers, and no other lock is held.
    """
    for leaf in read_leaves(connection, relation.oid):
        execute_within(connection, f"LOCK TABLE ONLY {leaf.table.sql} IN SHARE UPDATE EXCLUSIVE MODE", wait_s)


def _addition(connection: Connection, name: str, relation: Relation) -> tuple[str, str]:
    """Return the command that adds the table, and a query that fails if it is not the selected table."""
    with connection.cursor() as cursor:
        check = cursor.mogrify(_IS_SELECTED, (relation.source_table.sql, relation.oid)).decode()
    # ONLY: a child by plain inheritance is a separate table, and is added if it is selected.
    return f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE ONLY {relation.source_table.sql}", check


def _replaced(relation: Relation) -> SnapshotError:
    return SnapshotError(
        f"{relation.table} is no longer the table that was selected (oid {relation.oid}): the"
        " selected one was dropped or renamed in between. Nothing is published",
        "run the command again, which selects the tables again",
    )


def create_at_once(
    connection: Connection, name: str, tables: Collection[TableName], lock_timeout_s: float = 10.0
) -> None:
    """Create a publication of these tables in one transaction: a process that dies leaves no partial one.

    It has the options of `create_publication`. All locks are acquired before it is created, within half of
    `deadlock_timeout` in total. Raises SnapshotError if they are not acquired within `lock_timeout_s` seconds
    of attempts, PrivilegeError, SourceError for a missing table. The publication does not exist then.
    """
    with source_errors(f"creating publication {name}"):
        partitioned = {TableName(*found) for found in rows(connection, _PARTITIONED)}
        # The publication includes children by inheritance, so lock those too. Of a partitioned table, lock
        # only the table itself.
        locked = (f"ONLY {one.sql}" if one in partitioned else one.sql for one in tables)
        options = _options(connection)
        commands = [
            f"LOCK TABLE {', '.join(locked)} IN {_AT_ONCE} MODE",
            _NAME_WAIT,
            "SET LOCAL statement_timeout = 0; "
            f"CREATE PUBLICATION {quote_identifier(name)} FOR TABLE {', '.join(one.sql for one in tables)}"
            f" WITH ({options})",
        ]

        def attempt(wait_s: float) -> None:
            try:
                if wait_s > SHORT_WAIT_S:
                    for table in tables:  # with no other lock held
                        execute_within(connection, f"LOCK TABLE ONLY {table.sql} IN {_AT_ONCE} MODE", wait_s)
                execute_together(connection, commands, min(wait_s, SHORT_WAIT_S))
            except (psycopg2.errors.LockNotAvailable, psycopg2.errors.QueryCanceled):
                raise SnapshotError(
                    f"publication {name} was not created: its locks were not granted within"
                    f" {lock_timeout_s:g} s: another session alters or vacuums one of them, or creates a"
                    " publication of that name",
                    "run the command again when that session has ended",
                ) from None

        with_short_waits(attempt, lock_timeout_s)


def drop_publication(connection: Connection, name: str, lock_timeout_s: float = 10.0) -> None:
    """Drop a publication, if it exists.

    Raises BusyError if a transaction that drops one of its tables, or alters the publication, does not end
    within `lock_timeout_s` seconds.
    """

    def attempt(_: float) -> None:
        # DROP PUBLICATION locks the membership of each table, and so waits for transactions that drop a
        # table. A DROP TABLE of another table would then wait for those as well, so wait only briefly.
        try:
            execute_within(connection, f"DROP PUBLICATION IF EXISTS {quote_identifier(name)}", _DROP_WAIT_S)
        except psycopg2.errors.LockNotAvailable:
            raise BusyError(
                f"publication {name} was not dropped within {lock_timeout_s:g} s: a transaction that has"
                " dropped one of its tables, or altered the publication, has not ended",
                "try again when it has",
            ) from None

    with source_errors(f"dropping publication {name}"):
        with_short_waits(attempt, lock_timeout_s, BusyError)


def _execute(connection: Connection, command: str) -> None:
    with connection.cursor() as cursor:
        cursor.execute(command)


@dataclass(frozen=True)
class Publishing:
    """A publication, and the oids of the tables whose changes are replicated."""

    publication: str
    oids: Sequence[int]

    def digest(self, connection: Connection, followed: Collection[TableName] = ()) -> int:
        """Return a hash of everything that determines which changes of these tables are published.

        It also differs after something was altered and altered back, and after another table has taken one of
        the names `followed`. Does not wait for locks, and does not read the tables.
        """
        by_schema = _BY_SCHEMA if connection.server_version >= COLUMN_LISTS_SINCE else "NULL"
        wanted = {"publication": self.publication, "oids": list(self.oids)}
        with source_errors(f"looking at publication {self.publication}"):
            query = _PUBLISHED.replace("{above}", ABOVE).replace("{schemas}", by_schema)
            found = rows(connection, query, wanted)
            found += rows(connection, _PLACES, wanted)
            found += sorted(find_tables(connection, followed).items())
        # Never 0, which means that no digest has been read.
        return (int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=8).digest()) >> 1) | 1

    def read_status(self, connection: Connection, names: Names) -> dict[int, PublicationStatus]:
        """Return each table's publication status; for a dropped table, the oid that has its name now.

        `had_rows` of partitions is not determined.
        """
        oids = list(self.oids)
        with source_errors(f"looking at publication {self.publication}"):
            members = memberships(connection, oids, self.publication, planned=False)
            present = {oid: more for oid, *more in rows(connection, _PRESENT, {"oids": oids})}
            partitioned = [oid for oid, (relkind, *_) in present.items() if relkind == "p"]
            leaves = leaves_of(connection, partitioned) if partitioned else {}
        found = {}
        for oid, member in members.items():
            if oid in present:
                partitions = tuple(_without_file(leaf) for leaf in leaves.get(oid, ()))
                place = (member.publication_oid, member.publication_xmin, member.oid, member.xmin)
                _, persistence, *name = present[oid]
                moved_to = _moved_to(connection, oid, TableName(*name), names(oid))
                found[oid] = PublicationStatus(oid, *place, member.links, persistence, partitions, moved_to)
            else:
                found[oid] = PublicationStatus(_successor(connection, names(oid)))
        return found


def _without_file(leaf: Leaf) -> Partition:
    """Return the partition without file and xmin, which a TRUNCATE changes before the stream reports it."""
    return replace(leaf.partition, relfilenode=0, xmin=0)


def _moved_to(
    connection: Connection, oid: int, name: TableName, names: Collection[TableName]
) -> TableName | None:
    """Return the relation's name if another table now has one of its former names, otherwise None.

    The stream does not report that.
    """
    taken = find_tables(connection, set(names) - {name})
    return name if set(taken.values()) - {oid} else None


def _successor(connection: Connection, names: Collection[TableName]) -> int:
    """Return the oid of the first table that has one of these names now, or 0 if there is none."""
    found = find_tables(connection, names)
    return found[min(found)] if found else 0
