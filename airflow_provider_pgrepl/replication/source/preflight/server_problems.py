"""What a server itself can have against a pipeline: settings, capacity, replication connections, the slot."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import (
    PgReplError,
    PrivilegeError,
    ServerSettingError,
    SlotError,
    SourceConnectionError,
)
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    address,
    connect_replication,
    current_database,
    row,
)
from airflow_provider_pgrepl.replication.source.server import Server
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors
from airflow_provider_pgrepl.replication.source.slot import PLUGIN, read_slot, why_invalidated

OLDEST_VERSION = 140000
_DECODING_ON_STANDBY_SINCE = 160000

_SLOTS = 2
"""A slot that stays, and the temporary one that exports its snapshot."""

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


def server_problems(
    connection: Connection, server: Server, slot: str | None, *, makes_slot: bool = True
) -> Problems:
    """Version, wal_level, standby, free slots and sender.

    `slot` stands already when it exists; `makes_slot`: whether another is made in its place.
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
            "raise max_replication_slots (needs a restart), or drop a slot that nobody needs: select"
            " slot_name, active from pg_replication_slots",
        )
    if used_senders >= senders:
        yield ServerSettingError(
            f"no WAL sender is free: {used_senders} of max_wal_senders = {senders} are in use",
            "raise max_wal_senders (needs a restart), or stop a client: select pid, application_name from"
            " pg_stat_replication",
        )


def replication_problems(dsn: str, server: Server) -> Problems:
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


def role_problems(connection: Connection, pipeline: Pipeline) -> Problems:
    """Whether the role has rights on the server's host, which code of tables' owners might come by."""
    if pipeline.trust_table_owners:
        return
    with source_errors("asking for the role"):
        role, is_superuser, mighty = row(connection, _ROLE)
    if is_superuser or mighty:
        what = "a superuser" if is_superuser else f"a member of {mighty}"
        yield PrivilegeError(
            f"role {role} is {what}: whoever owns a table, and gets code of his to run while it is read,"
            " would have the database's host",
            "connect as a role with only the rights that docs/reference/connection.md lists, or set"
            " trust_table_owners to true if every owner of a replicated table may have those of this role",
        )


def slot_problems(connection: Connection, pipeline: Pipeline, *, new_epoch: bool) -> Problems:
    """Whether a slot of the pipeline's name that exists already can be its slot."""
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
            f"slot {slot.name} exists and is somebody else's: plugin {slot.plugin}, database {slot.database}",
            "give the pipeline another slot name",
        )
    # A new epoch drops the slot, whatever became of it.
    elif slot.invalidation and not new_epoch:
        yield SlotError(why_invalidated(connection, slot), hints.NEW_EPOCH)
