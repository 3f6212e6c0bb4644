"""The publication: which tables' changes the slot's stream carries."""

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
from airflow_provider_pgrepl.replication.postgres.relation import Partition, PublicationStanding, Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, leaves_of, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    ABOVE,
    COLUMN_LISTS_SINCE,
    GENERATED_COLUMNS_SINCE,
    find_relation,
    memberships,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import Mode, lock_command, lock_errors
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import (
    SHORT_WAIT_S,
    execute_together,
    execute_within,
    with_short_waits,
)

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
_PARTITIONED = """
SELECT n.nspname::text, c.relname::text
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.relkind = 'p'
"""
_MAKER = """
SELECT p.oid::bigint, r.rolname::text, pg_catalog.obj_description(p.oid, 'pg_publication')
FROM pg_catalog.pg_publication p LEFT JOIN pg_catalog.pg_roles r ON r.oid = p.pubowner WHERE p.pubname = %s
"""
# Fails with undefined_table if the name is another table's by now. To be run under a lock of that table.
_IS_SELECTED = """
SELECT (CASE WHEN pg_catalog.to_regclass(%s)::pg_catalog.oid = %s THEN 'pg_catalog.pg_class'
    ELSE 'pg_catalog.another_table' END)::pg_catalog.regclass
"""
_AT_ONCE = "SHARE UPDATE EXCLUSIVE"
# CREATE PUBLICATION waits for another transaction that creates one of the same name. The lock timeout covers
# that wait, which may last for the rest of the time. The statement itself may take longer with many tables.
_NAME_WAIT = (
    "SELECT pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('statement_timeout'), true)"
)
_DROP_WAIT_S = 0.01
# Rows that are altered, or made again, have another xmin; one that is frozen or moved keeps it.
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
# Where rows are: links from a table to its partitions, and whether what is there is logged. What is unlogged
# sends nothing, and only what is listed cannot become so.
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
"""What a relation was called."""


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
    name is taken, PrivilegeError when a right is missing, SnapshotError when a lock on a table was not had
    within `lock_timeout_s`, as while it is altered or vacuumed, or another table has its name by now. The
    publication is not there then.
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
            # One by one: whoever holds a lock while it waits for another may deadlock the application.
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
        log.warning("%s", error)


def _publish(connection: Connection, name: str, relation: Relation, wait_s: float) -> None:
    try:
        execute_within(connection, "; ".join(_addition(connection, name, relation)), wait_s)
    except psycopg2.errors.UndefinedTable:
        raise _replaced(relation) from None
    except psycopg2.errors.LockNotAvailable:
        raise SnapshotError(
            f"publication {name} was not created, because a lock on {relation.table} was not had: another"
            " session alters or vacuums it",
            "try again when that is done, or raise lock_timeout_s",
        ) from None


def add_tables(dsn: str, name: str, relations: Iterable[Relation], lock_timeout_s: float) -> list[Relation]:
    """Add those that are not in it yet; says which these were. Each joins between two of its writers.

    In one transaction a table is locked against writers, and the publication altered: whether the changes of
    a transaction that has begun to write it before are sent would be left to chance. Raises SnapshotError
    when a lock is not had in time, or another table has the name of one by now; PublicationError when there
    is no such publication; PrivilegeError. The publication is then as it was.
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
        _take_out(dsn, name, [relation.oid for relation in left], lock_timeout_s)
        raise
    finally:
        connection.close()


def _take_out(dsn: str, name: str, oids: list[int], lock_timeout_s: float) -> None:
    """Over another connection: the first may be lost, or in a transaction that failed. Does not raise."""
    if not oids:
        return
    try:
        with closing(connect(dsn, f"publish {name}")) as connection:
            drop_tables(connection, name, table_names(connection, oids), lock_timeout_s)
    except PgReplError as error:
        log.warning("the tables with oids %s stay in publication %s: %s", oids, name, error)


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

    # Writers that come while the lock is waited for wait behind it.
    with_short_waits(attempt, lock_timeout_s)


def _end_autovacuum(connection: Connection, relation: Relation, wait_s: float) -> None:
    """Wait for each partition by itself, in a mode that writers do not notice: no other lock is held."""
    for leaf in read_leaves(connection, relation.oid):
        execute_within(connection, f"LOCK TABLE ONLY {leaf.table.sql} IN SHARE UPDATE EXCLUSIVE MODE", wait_s)


def _addition(connection: Connection, name: str, relation: Relation) -> tuple[str, str]:
    """Return what adds the table, and what then fails if it was another one than the selected one."""
    with connection.cursor() as cursor:
        check = cursor.mogrify(_IS_SELECTED, (relation.table.sql, relation.oid)).decode()
    # ONLY: a child by plain inheritance is a table of its own, and taken in when it is asked for.
    return f"ALTER PUBLICATION {quote_identifier(name)} ADD TABLE ONLY {relation.table.sql}", check


def _replaced(relation: Relation) -> SnapshotError:
    return SnapshotError(
        f"{relation.table} is no longer the table that was selected (oid {relation.oid}): that one was"
        " dropped or renamed meanwhile. Nothing is published",
        "try again: the tables are selected anew",
    )


def create_at_once(
    connection: Connection, name: str, tables: Collection[TableName], lock_timeout_s: float = 10.0
) -> None:
    """Create a publication of these tables in one transaction: no process that ends amid it leaves a part.
    It publishes what one of `create_publication` does.

    All locks are had before it is created, and are waited for half of `deadlock_timeout` together. Raises
    SnapshotError when they are not had within `lock_timeout_s`, PrivilegeError, SourceError for a table that
    is not there. The publication is not there then.
    """
    with source_errors(f"creating publication {name}"):
        partitioned = {TableName(*found) for found in rows(connection, _PARTITIONED)}
        # A publication holds a parent's children by inheritance as well, and a partitioned table alone.
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
                    f"publication {name} was not created, because its locks were not had within"
                    f" {lock_timeout_s:g} s: another session alters or vacuums one of them, or creates a"
                    " publication of that name",
                    "try again when that is done",
                ) from None

        with_short_waits(attempt, lock_timeout_s)


def drop_publication(connection: Connection, name: str, lock_timeout_s: float = 10.0) -> None:
    """Drop a publication, if there is one. Raises BusyError when a transaction that drops one of its tables,
    or alters the publication, does not end within `lock_timeout_s`."""

    def attempt(_: float) -> None:
        # It locks the membership of each table, which waits for transactions that drop the table. Hence
        # DROP TABLE of another table would wait for them, too.
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
    """A publication, and the tables whose changes are followed, by oid."""

    publication: str
    oids: Sequence[int]

    def digest(self, connection: Connection) -> int:
        """A hash of all that decides what is published of these tables; it never comes back to what it was
        when something was altered and set back. Waits for no lock, and reads no table of theirs."""
        by_schema = _BY_SCHEMA if connection.server_version >= COLUMN_LISTS_SINCE else "NULL"
        wanted = {"publication": self.publication, "oids": list(self.oids)}
        with source_errors(f"looking at publication {self.publication}"):
            query = _PUBLISHED.replace("{above}", ABOVE).replace("{schemas}", by_schema)
            found = rows(connection, query, wanted)
            found += rows(connection, _PLACES, wanted)
        # Never 0, which says that nobody has looked.
        return (int.from_bytes(hashlib.blake2b(repr(found).encode(), digest_size=8).digest()) >> 1) | 1

    def standings(self, connection: Connection, names: Names) -> dict[int, PublicationStanding]:
        """How each is published now; where one is gone, who has its name. It is silent of `had_rows`."""
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
                found[oid] = PublicationStanding(oid, *place, member.links, persistence, partitions, moved_to)
            else:
                found[oid] = PublicationStanding(_successor(connection, names(oid)))
        return found


def _without_file(leaf: Leaf) -> Partition:
    """A file moves with a TRUNCATE that the stream has yet to tell of."""
    return replace(leaf.partition, relfilenode=0, xmin=0)


def _moved_to(
    connection: Connection, oid: int, name: TableName, names: Collection[TableName]
) -> TableName | None:
    """Return the relation's name if another relation has one now that it had, which no stream tells of."""
    is_taken = any(_successor(connection, [former]) not in (0, oid) for former in names if former != name)
    return name if is_taken else None


def _successor(connection: Connection, names: Collection[TableName]) -> int:
    """The oid of the table that has one of these names now; 0 when none has."""
    for name in sorted(names):
        found = find_relation(connection, name)
        if found is not None:
            return found.oid
    return 0
