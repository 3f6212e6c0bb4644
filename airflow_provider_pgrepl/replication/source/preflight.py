"""Everything about the source that would make a pipeline fail, found before anything is created."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    PublicationError,
    ServerSettingError,
    SlotError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog import Server, read_server, resolve_tables
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    address,
    connect,
    connect_replication,
    describe,
    row,
    rows,
    source_errors,
)
from airflow_provider_pgrepl.replication.source.publication import read_publication
from airflow_provider_pgrepl.replication.source.relations import read_leaves
from airflow_provider_pgrepl.replication.source.slot import PLUGIN, read_slot

OLDEST_VERSION = 140000
_DECODING_ON_STANDBY_SINCE = 160000

_CAPACITY = """
SELECT pg_catalog.current_setting('max_replication_slots')::int,
    (SELECT count(*) FROM pg_catalog.pg_replication_slots)::int,
    pg_catalog.current_setting('max_wal_senders')::int,
    (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders())::int
"""

_RIGHTS = """
SELECT c.oid::bigint, pg_catalog.format('%%I', n.nspname), pg_catalog.format('%%I.%%I', n.nspname, c.relname),
    pg_catalog.has_schema_privilege(n.oid, 'USAGE'), pg_catalog.has_table_privilege(c.oid, 'SELECT'),
    pg_catalog.row_security_active(c.oid), pg_catalog.pg_has_role(c.relowner, 'USAGE')
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = ANY (%s::oid[]) ORDER BY 3
"""

_CREATE_RIGHT = """
SELECT current_user::text, pg_catalog.current_database()::text,
    pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE')
"""

Problems = Iterator[PgReplError]


def check_server(dsn: str, slot: str | None = None) -> Server:
    """Check what does not depend on tables: version, wal_level, free slot and sender, replication right.

    A slot named `slot` that exists already needs no free one. Raises one error that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*_server_problems(connection, server, slot), *_replication_problems(dsn, server)])
        return server
    finally:
        connection.close()


def check_source(dsn: str, pipeline: Pipeline, *, new_epoch: bool = False) -> list[Relation]:
    """Check all that the pipeline needs of its source; nothing is created. The tables it will replicate.

    Raises one error of the first problem's kind that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        problems = [
            *_server_problems(connection, server, pipeline.slot),
            *_replication_problems(dsn, server),
            *_slot_problems(connection, pipeline, new_epoch=new_epoch),
        ]
        relations: list[Relation] = []
        try:
            relations = resolve_tables(connection, pipeline)
        except PgReplError as error:
            problems.append(error)
        problems += _right_problems(connection, relations)
        problems += _publication_problems(connection, pipeline, server, relations)
        _raise(problems)
        return relations
    finally:
        connection.close()


def _raise(problems: list[PgReplError]) -> None:
    if not problems:
        return
    first = problems[0]
    if len(problems) == 1:
        raise first
    hints = [problem.hint for problem in problems if problem.hint]
    raise type(first)("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))


def _server_problems(connection: Connection, server: Server, slot: str | None) -> Problems:
    if server.version_num < OLDEST_VERSION:
        yield ServerSettingError(
            f"the server is PostgreSQL {server.version_num // 10000}", "PostgreSQL 14 is the oldest supported"
        )
    if server.wal_level != "logical":
        yield ServerSettingError(
            f"wal_level is {server.wal_level}, and must be logical",
            "ALTER SYSTEM SET wal_level = logical, then restart the server (Amazon RDS and Aurora:"
            " rds.logical_replication = 1; Cloud SQL: cloudsql.logical_decoding = on)",
        )
    if server.in_recovery and server.version_num < _DECODING_ON_STANDBY_SINCE:
        yield ServerSettingError(
            "the server is a standby, from which PostgreSQL replicates logically only since 16",
            "replicate from the primary",
        )
    with source_errors("counting slots and senders"):
        slots, used_slots, senders, used_senders = row(connection, _CAPACITY)
    exists = slot is not None and read_slot(connection, slot) is not None
    if used_slots >= slots and not exists:
        yield ServerSettingError(
            f"no replication slot is free: {used_slots} of max_replication_slots = {slots} exist",
            "raise max_replication_slots (needs a restart), or drop a slot that nobody needs: select"
            " slot_name, active from pg_replication_slots",
        )
    if used_senders >= senders:
        yield ServerSettingError(
            f"no WAL sender is free: {used_senders} of max_wal_senders = {senders} are in use",
            "raise max_wal_senders (needs a restart), or stop a client: select pid, application_name from"
            " pg_stat_replication",
        )


def _replication_problems(dsn: str, server: Server) -> Problems:
    """What a replication connection says; only trying tells on managed servers, whose roles differ."""
    try:
        connection = connect_replication(dsn, "preflight")
    except ServerSettingError:
        return  # no sender was free, which has been said
    except PgReplError as error:
        yield error
        return
    direct = "use the server's direct address and port, not that of a connection pooler"
    try:
        identifier = row(connection, "IDENTIFY_SYSTEM")[0]
        if identifier != server.system_identifier:
            yield SourceConnectionError(
                f"{address(dsn)} leads to one server for queries and to another for replication", direct
            )
    except psycopg2.errors.SyntaxError:
        yield SourceConnectionError(
            f"{address(dsn)} does not make replication connections: something in between ignores"
            " replication=database",
            direct,
        )
    except psycopg2.Error as error:
        yield SourceConnectionError(f"IDENTIFY_SYSTEM at {address(dsn)}: {describe(error)}", direct)
    finally:
        connection.close()


def _slot_problems(connection: Connection, pipeline: Pipeline, *, new_epoch: bool) -> Problems:
    slot = read_slot(connection, pipeline.slot)
    if slot is None:
        return
    with source_errors("asking for the database"):
        database = row(connection, "SELECT pg_catalog.current_database()::text")[0]
    if slot.plugin != PLUGIN or slot.database != database:
        yield SlotError(
            f"slot {slot.name} exists and is somebody else's: plugin {slot.plugin}, database {slot.database}",
            "give the pipeline another slot name",
        )
    # A new epoch drops the slot, whatever became of it.
    elif slot.invalidation and not new_epoch:
        yield SlotError(
            f"slot {slot.name} was invalidated by the server ({slot.invalidation}): changes are lost",
            "run the snapshot app with --new-epoch to take everything anew",
        )


def _right_problems(connection: Connection, relations: Iterable[Relation]) -> Problems:
    oids = _with_leaves(connection, relations)
    with source_errors("reading the rights"):
        found = rows(connection, _RIGHTS, (oids,))
        role = row(connection, "SELECT pg_catalog.quote_ident(current_user::text)")[0]
    closed = sorted({schema for _, schema, _, usage, *_ in found if not usage})
    unreadable = [table for _, _, table, _, select, *_ in found if not select]
    filtered = [table for *_, table, _, _, policy, _ in found if policy]
    if closed:
        schemas = ", ".join(closed)
        yield PrivilegeError(
            f"role {role} lacks USAGE on schema {schemas}", f"GRANT USAGE ON SCHEMA {schemas} TO {role}"
        )
    if unreadable:
        tables = ", ".join(unreadable)
        yield PrivilegeError(f"role {role} lacks SELECT on {tables}", f"GRANT SELECT ON {tables} TO {role}")
    if filtered:
        yield PrivilegeError(
            f"row-level security would hide rows of {', '.join(filtered)} from role {role}",
            f"ALTER ROLE {role} BYPASSRLS, or use the tables' owner",
        )


def _with_leaves(connection: Connection, relations: Iterable[Relation]) -> list[int]:
    oids = {relation.oid for relation in relations}
    for relation in relations:
        if relation.relkind == "p":
            oids |= {leaf.oid for leaf in read_leaves(connection, relation.oid)}
    return sorted(oids)


def _publication_problems(
    connection: Connection, pipeline: Pipeline, server: Server, relations: list[Relation]
) -> Problems:
    check: Callable[..., Problems] = (
        _used_publication_problems if pipeline.publication_mode == "use" else _created_publication_problems
    )
    yield from check(connection, pipeline, server, relations)


def _used_publication_problems(
    connection: Connection, pipeline: Pipeline, _: Server, relations: list[Relation]
) -> Problems:
    name = pipeline.publication
    publication = read_publication(connection, name)
    if publication is None:
        yield PublicationError(
            f"there is no publication {name}", "create it, or set publication_mode to create"
        )
        return
    operations = ("insert", "update", "delete", "truncate")
    missing = [operation for operation in operations if not getattr(publication, operation)]
    if missing:
        yield PublicationError(
            f"publication {name} does not publish {', '.join(missing)}",
            f"ALTER PUBLICATION {name} SET (publish = 'insert, update, delete, truncate')",
        )
    if not publication.via_root and any(relation.relkind == "p" for relation in relations):
        yield PublicationError(
            f"publication {name} publishes partitions under their own names",
            f"ALTER PUBLICATION {name} SET (publish_via_partition_root = true)",
        )
        return
    outside = [str(relation.table) for relation in relations if relation.table not in publication.tables]
    if outside:
        tables = ", ".join(outside)
        yield PublicationError(
            f"publication {name} does not hold {tables}", f"ALTER PUBLICATION {name} ADD TABLE {tables}"
        )


def _created_publication_problems(
    connection: Connection, pipeline: Pipeline, server: Server, relations: list[Relation]
) -> Problems:
    publication = read_publication(connection, pipeline.publication)
    if publication is None and server.in_recovery:
        yield PublicationError(
            "a publication cannot be created on a standby",
            "create it on the primary, and set publication_mode to use",
        )
        return
    with source_errors("reading the rights"):
        role, database, may_create = row(connection, _CREATE_RIGHT)
        found = rows(connection, _RIGHTS, ([relation.oid for relation in relations],))
    if publication is None and not may_create:
        yield PrivilegeError(
            f"role {role} may not create a publication: it lacks CREATE on database {database}",
            f'GRANT CREATE ON DATABASE "{database}" TO "{role}", or let its owner create the publication, and'
            " set publication_mode to use",
        )
    published = frozenset() if publication is None else publication.tables
    unpublished = {relation.oid for relation in relations if relation.table not in published}
    foreign = [table for oid, _, table, *_, owner in found if not owner and oid in unpublished]
    if foreign:
        yield PrivilegeError(
            f"role {role} may not publish {', '.join(foreign)}: only a table's owner may",
            f'GRANT the owning role TO "{role}", or let the owner create the publication, and set'
            " publication_mode to use",
        )
