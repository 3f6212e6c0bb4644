"""The checks of a server for a pipeline: settings, capacity, replication connections, role and slot."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    ServerSettingError,
    SlotError,
    SourceConnectionError,
    one_line,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.partitions import inherited_warnings
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    address,
    connect,
    connect_replication,
    current_database,
    row,
    rows,
)
from airflow_provider_pgrepl.replication.source.failover import failover_problems, failover_warnings
from airflow_provider_pgrepl.replication.source.server import (
    Server,
    read_server,
    read_slot_limits,
    synchronous_problem,
)
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors
from airflow_provider_pgrepl.replication.source.slot import PLUGIN, read_slot, why_invalidated

from .selection import RequestedTables, resolve_tables
from .tables import code_problems, lock_problems, publication_problems, right_problems

OLDEST_VERSION = 140000
_DECODING_ON_STANDBY_SINCE = 160000

_SLOTS = 2
"""The permanent slot, and the temporary one that exports its snapshot."""

_CAPACITY = """
SELECT pg_catalog.current_setting('max_replication_slots')::int,
    (SELECT count(*) FROM pg_catalog.pg_replication_slots)::int,
    pg_catalog.current_setting('max_wal_senders')::int,
    (SELECT count(*) FROM pg_catalog.pg_stat_get_wal_senders())::int
"""

_ROLE = """
SELECT pg_catalog.quote_ident(r.rolname), r.rolsuper,
    (SELECT pg_catalog.string_agg(m.rolname, ', ' ORDER BY m.rolname) FROM pg_catalog.pg_roles m
        WHERE m.rolname = ANY (ARRAY['pg_execute_server_program', 'pg_write_server_files',
            'pg_read_server_files']) AND pg_catalog.pg_has_role(m.oid, 'MEMBER'))
FROM pg_catalog.pg_roles r WHERE r.rolname = current_user
"""

Problems = Iterator[PgReplError]
# If schema _pgrepl does not exist yet, the current role will own it.
_OWNER_WITHOUT_RIGHT = """
SELECT r.rolname::text FROM pg_catalog.pg_database d JOIN pg_catalog.pg_roles r ON r.oid = d.datdba
WHERE d.datname = pg_catalog.current_database()
    AND NOT pg_catalog.pg_has_role(r.oid, 'pg_read_all_data', 'USAGE')
    AND NOT coalesce((SELECT pg_catalog.has_schema_privilege(r.oid, n.oid, 'USAGE')
        FROM pg_catalog.pg_namespace n WHERE n.nspname = '_pgrepl'),
        pg_catalog.pg_has_role(r.oid, current_user, 'USAGE'))
"""
_SENDABLE = (
    "UTF8 LATIN1 LATIN2 LATIN4 LATIN5 LATIN6 LATIN7 LATIN8 LATIN9 LATIN10 WIN866 WIN1256 KOI8R KOI8U"
    " ISO_8859_5"
)
ALWAYS_SENDABLE = frozenset(_SENDABLE.split())
"""The encodings in which every byte that PostgreSQL accepts can be converted to UTF-8."""
_MOVES_SLOTS_RIGHTLY = {14: 140018, 15: 150013, 16: 160009, 17: 170005}
"""By major version, the first release that retains catalog rows for a slot that is advanced.
https://postgrespro.com/list/id/E1u9I5V-00291M-0Z@gemulon.postgresql.org"""
log = logging.getLogger(__name__)


def server_problems(
    connection: Connection, server: Server, slot: str | None, *, makes_slot: bool = True
) -> Problems:
    """Yield the problems of version, wal_level, standby, free slots and free walsenders.

    `slot`: the pipeline's slot, which may exist. `makes_slot`: a slot is created, also if `slot` exists.
    """
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
    needed = _SLOTS - exists if makes_slot or not exists else 0
    if used_slots + needed > slots:
        yield ServerSettingError(
            f"too few replication slots are free: {used_slots} of max_replication_slots = {slots} exist, and"
            f" {needed} more {'is' if needed == 1 else 'are'} needed, one only while a snapshot is taken",
            "raise max_replication_slots (needs a restart), or drop a slot that no program needs (that loses"
            " the changes that its reader lacks): select slot_name, active from pg_replication_slots",
        )
    if used_senders >= senders:
        yield ServerSettingError(
            f"no WAL sender is free: {used_senders} of max_wal_senders = {senders} are in use",
            "raise max_wal_senders (needs a restart), or stop a client: select pid, application_name from"
            " pg_stat_replication",
        )


def replication_problems(dsn: str, server: Server) -> Problems:
    """Yield the problems of a replication connection. On managed servers, only an attempt shows them."""
    try:
        connection = connect_replication(dsn, "preflight")
    except ServerSettingError:
        return  # no walsender is free, which server_problems reports
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


def role_problems(connection: Connection, pipeline: Pipeline) -> Problems:
    """Yield an error if the role has rights on the server's host, which code of tables' owners could use."""
    if pipeline.trust_table_owners:
        return
    with source_errors("asking for the role"):
        role, is_superuser, mighty = row(connection, _ROLE)
    if is_superuser or mighty:
        what = "a superuser" if is_superuser else f"a member of {mighty}"
        yield PrivilegeError(
            f"role {role} is {what}: the owner of a table whose code runs while the table is read"
            " could access the database's host",
            f"connect as a role with only the rights that {errors.document('reference/connection')} lists, or"
            " set trust_table_owners to true if every owner of a replicated table may have the rights of this"
            " role",
        )


def slot_problems(connection: Connection, pipeline: Pipeline, *, new_epoch: bool) -> Problems:
    """Yield the reason why an existing slot with the pipeline's slot name cannot be its slot."""
    slot = read_slot(connection, pipeline.slot)
    if slot is None:
        return
    database = current_database(connection)
    if slot.database not in (None, database):
        yield SlotError(
            f"slot {slot.name} is of database {slot.database}, and the connection leads to database"
            f" {database}",
            f"if the pipeline reads {slot.database}, check the connection (conn_id, or PGREPL_DSN); if the"
            " pipeline is new, give it another slot name",
        )
    elif slot.plugin != PLUGIN:
        yield SlotError(
            f"slot {slot.name} exists and belongs to another program: plugin {slot.plugin}, database"
            f" {slot.database}",
            "give the pipeline another slot name",
        )
    # A new epoch drops the slot, also if it is invalidated.
    elif slot.invalidation and not new_epoch:
        yield SlotError(why_invalidated(connection, slot), errors.NEW_EPOCH)


def server_warnings(connection: Connection, slot: str) -> Iterator[str]:
    """Yield warnings about the server, the database, and the walsender of a slot."""
    if synchronous := synchronous_problem(connection, slot):
        yield synchronous
    version = connection.server_version
    if version < _MOVES_SLOTS_RIGHTLY.get(version // 10000, 0):
        first = _MOVES_SLOTS_RIGHTLY[version // 10000]
        yield (
            f"this server is PostgreSQL {version // 10000}.{version % 10000}. Before {first // 10000}."
            f"{first % 10000} a slot that is moved may lose what it needs of the catalog, so that"
            " replication ends with an error of the server's: upgrade it"
        )
    yield from _slot_limits(connection)
    yield from _unreadable_schema(connection)
    with source_errors("asking for the encoding"):
        encoding = row(connection, "SELECT pg_catalog.current_setting('server_encoding')")[0]
    if encoding not in ALWAYS_SENDABLE:
        yield (
            f"the database's encoding is {encoding}, in which PostgreSQL accepts text that it cannot"
            " convert to UTF-8. One such value in a published table stops the replication of the"
            " whole pipeline at its transaction, until the transaction is skipped. A copy of the"
            " table stops at it as well"
        )


def _slot_limits(connection: Connection) -> Iterator[str]:
    """Yield warnings about server settings that invalidate the slot of a stopped or lagging pipeline."""
    limits = read_slot_limits(connection)
    if limits.wal_keep_bytes is not None:
        yield (
            f"max_slot_wal_keep_size is {limits.wal_keep_shown}: the server invalidates the slot of a"
            " pipeline that is behind by more, which then needs a new epoch"
        )
    if limits.idle_s:
        yield (
            f"idle_replication_slot_timeout is {limits.idle_shown}: the server invalidates the slot if no"
            " walsender reads it for that time, for example while the pipeline is stopped. The"
            " pipeline then needs a new epoch. During a snapshot the slot is kept in use"
        )


def _unreadable_schema(connection: Connection) -> Iterator[str]:
    """Yield a warning if backups by the database's owner will fail from the first snapshot on."""
    with source_errors("asking for the owner of the database"):
        found = rows(connection, _OWNER_WITHOUT_RIGHT)
    for (owner,) in found:
        yield (
            f"role {one_line(owner)}, which owns the database, may not read schema _pgrepl, which the"
            " pipeline makes there: pg_dump by this role ends with an error. Give it"
            " --exclude-schema=_pgrepl"
        )


def check_server(dsn: str, slot: str | None = None) -> Server:
    """Check what does not depend on tables: version, wal_level, free slots and walsenders, replication right.

    A pipeline needs two free slots, or one if its own `slot` exists. Raises one error that lists all
    problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*server_problems(connection, server, slot), *replication_problems(dsn, server)])
        return server
    finally:
        connection.close()


def check_source(
    dsn: str,
    pipeline: Pipeline,
    requested: RequestedTables | None = None,
    *,
    new_epoch: bool = False,
    makes_slot: bool = False,
) -> list[Relation]:
    """Check everything that the pipeline needs of its source, and return the tables that it will replicate.

    Creates nothing. `makes_slot`: a slot will be created, also if one exists. Raises one error of the first
    problem's class that lists all problems.
    """
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        problems = [
            *_surroundings(connection, dsn, pipeline, server, new_epoch=new_epoch, makes_slot=makes_slot)
        ]
        relations: list[Relation] = []
        try:
            relations = resolve_tables(connection, pipeline, requested)
        except PgReplError as error:
            problems.append(error)
        problems += right_problems(connection, relations)
        problems += lock_problems(connection, dsn, relations)
        problems += publication_problems(connection, pipeline, server, relations)
        problems += code_problems(connection, pipeline, relations)
        _raise(problems)
        for warning in server_warnings(connection, pipeline.slot):
            log.warning("%s", warning)
        for warning in failover_warnings(connection, pipeline.slot, pipeline.failover):
            log.warning("%s", warning)
        if requested is None:
            for warning in inherited_warnings(connection, [relation.oid for relation in relations]):
                log.warning("%s", warning)
        return relations
    finally:
        connection.close()


def check_surroundings(dsn: str, pipeline: Pipeline) -> None:
    """Check what concerns every table of a started pipeline: server, replication right, slot, role."""
    connection = connect(dsn, "preflight")
    try:
        server = read_server(connection)
        _raise([*_surroundings(connection, dsn, pipeline, server, new_epoch=False, makes_slot=False)])
    finally:
        connection.close()


def check_role(dsn: str, pipeline: Pipeline) -> None:
    """Check that the role has no rights that code of tables' owners must not get."""
    connection = connect(dsn, "preflight")
    try:
        _raise([*role_problems(connection, pipeline)])
    finally:
        connection.close()


def table_faults(
    connection: Connection, pipeline: Pipeline, relations: Sequence[Relation]
) -> dict[TableName, PgReplError]:
    """Return why single tables cannot be read or published, although they could be replicated, by table."""
    server = read_server(connection)

    def faults(some: list[Relation]) -> list[PgReplError]:
        return [
            *right_problems(connection, some),
            *publication_problems(connection, pipeline, server, some),
            *code_problems(connection, pipeline, some),
        ]

    if not faults(list(relations)):
        return {}
    by_table = {relation.table: faults([relation]) for relation in relations}
    return {table: _joined(found) for table, found in by_table.items() if found}


def _surroundings(
    connection: Connection, dsn: str, pipeline: Pipeline, server: Server, *, new_epoch: bool, makes_slot: bool
) -> Iterator[PgReplError]:
    yield from server_problems(connection, server, pipeline.slot, makes_slot=makes_slot)
    yield from failover_problems(server, pipeline.failover)
    yield from replication_problems(dsn, server)
    yield from slot_problems(connection, pipeline, new_epoch=new_epoch)
    yield from role_problems(connection, pipeline)


def _raise(problems: list[PgReplError]) -> None:
    if problems:
        raise _joined(problems)


def _joined(problems: list[PgReplError]) -> PgReplError:
    first = problems[0]
    if len(problems) == 1:
        return first
    hints = [problem.hint for problem in problems if problem.hint]
    return type(first)("\n".join(problem.message for problem in problems), "\n  hint: ".join(hints))
