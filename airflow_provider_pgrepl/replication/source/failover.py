"""Failover slots, which physical standbys synchronize, and the settings that they need.

PostgreSQL 17 and later: a slot that was created with FAILOVER, or altered to have it, is copied to each
standby with `sync_replication_slots`. Once the standby is promoted, the slot can be read there.
https://www.postgresql.org/docs/current/logicaldecoding-explanation.html#LOGICALDECODING-REPLICATION-SLOTS-SYNCHRONIZATION
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from typing import Literal

from airflow_provider_pgrepl.errors import PgReplError, ServerSettingError, one_line
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier, quote_literal

from .connection import Connection, connect, connect_replication, other_hosts, row, rows, server_dsn
from .server import Server, read_server
from .server_errors import source_errors
from .slot import Slot, read_slot

FailoverChoice = bool | Literal["auto"]
SINCE = 170000

# A role without pg_read_all_stats does not see the state of other sessions' walsenders. A standby that
# synchronizes slots has a physical slot.
_HAS_STANDBY = """
SELECT pg_catalog.current_setting('synchronized_standby_slots', true) <> ''
    OR EXISTS (SELECT FROM pg_catalog.pg_replication_slots WHERE slot_type = 'physical' AND NOT temporary)
    OR EXISTS (SELECT FROM pg_catalog.pg_stat_replication r WHERE r.state IN ('streaming', 'catchup')
        AND NOT EXISTS (SELECT FROM pg_catalog.pg_replication_slots s
            WHERE s.active_pid = r.pid AND s.slot_type = 'logical'))
"""
_PHYSICAL_SLOTS = """
SELECT slot_name::text, active FROM pg_catalog.pg_replication_slots
WHERE slot_type = 'physical' AND NOT temporary ORDER BY 1
"""
_STANDBY_SLOTS = """
SELECT pg_catalog.btrim(name), coalesce(s.active, false)
FROM pg_catalog.unnest(pg_catalog.string_to_array(
        pg_catalog.current_setting('synchronized_standby_slots'), ',')) AS listed (name)
    LEFT JOIN pg_catalog.pg_replication_slots s
        ON s.slot_name = pg_catalog.btrim(name, ' "') AND s.slot_type = 'physical'
"""
_STANDBY = """
SELECT pg_catalog.current_setting('sync_replication_slots', true),
    pg_catalog.current_setting('hot_standby_feedback'), pg_catalog.current_setting('primary_slot_name'),
    pg_catalog.current_setting('wal_level')
"""
_RELOAD = "SELECT pg_reload_conf()"
log = logging.getLogger(__name__)


def wants_failover(connection: Connection, server: Server, choice: FailoverChoice) -> bool:
    """Return True if a pipeline's slot is to be a failover slot, by its setting `failover`.

    `auto` stands for true if the server supports it, and has a physical standby. Raises SourceError.
    """
    if choice is False or server.version_num < SINCE or server.in_recovery:
        return False
    if choice is True:
        return True
    with source_errors("looking for standbys"):
        return bool(row(connection, _HAS_STANDBY)[0])


def failover_problems(server: Server, choice: FailoverChoice) -> Iterator[PgReplError]:
    """Yield the error of a setting that the server cannot fulfill."""
    if choice is True and server.version_num < SINCE:
        yield ServerSettingError(
            f"failover is true, and the server is PostgreSQL {server.version_num // 10000}: slots can be"
            " synchronized to standbys since 17",
            'set `failover` to "auto", or leave it out',
        )
    if choice is True and server.in_recovery:
        yield ServerSettingError(
            "failover is true, and the server is a standby, whose own slots cannot be synchronized",
            'set `failover` to "auto", or connect to the primary',
        )


def alter_failover(dsn: str, slot: str, choice: FailoverChoice) -> None:
    """Make an existing slot a failover slot, or an ordinary one, if the setting asks for it.

    `auto` leaves a failover slot as it is. Logs an error, such as that of a slot which a walsender reads:
    changes are received all the same. Raises SourceError if the server cannot be asked.
    """
    with closing(connect(dsn, "failover")) as connection:
        server, found = read_server(connection), read_slot(connection, slot)
        wanted = wants_failover(connection, server, choice)
        if found is None or found.invalidation or server.version_num < SINCE or server.in_recovery:
            return
        if found.failover == wanted or (choice == "auto" and not wanted):
            return
        try:
            set_failover(server_dsn(connection), slot, is_wanted=wanted)
        except PgReplError as error:
            log.warning("slot %s was not altered (failover %s): %s", slot, wanted, error.message)
        else:
            log.info("slot %s was altered: failover %s", slot, str(wanted).lower())


def set_failover(dsn: str, slot: str, *, is_wanted: bool) -> None:
    """Set the property FAILOVER of a slot, which must not be read by a walsender. Raises SourceError."""
    command = f"ALTER_REPLICATION_SLOT {quote_identifier(slot)} (FAILOVER {str(is_wanted).lower()})"
    with (
        closing(connect_replication(dsn, "failover")) as replication,
        source_errors(f"altering slot {slot}"),
        replication.cursor() as cursor,
    ):
        cursor.execute(command)


def failover_warnings(connection: Connection, slot: str, choice: FailoverChoice) -> Iterator[str]:
    """Yield what a failover to a standby lacks, each with the statement that sets it. Raises SourceError.

    The standbys that the connection string of `connection` names are asked, too.
    """
    server = read_server(connection)
    if not wants_failover(connection, server, choice):
        return
    found = read_slot(connection, slot)
    if found is not None and not found.failover:
        yield (
            f"slot {slot} is not a failover slot yet: the next start of the replication app alters it, if no"
            " process reads it"
        )
    yield from _primary_warnings(connection)
    standbys = list(_standbys(connection))
    for host, standby in standbys:
        with closing(standby):
            yield from _standby_warnings(host, standby, found)
    if not standbys:
        yield (
            "no standby could be checked: list the hosts of primary and standbys in the connection, with"
            " target_session_attrs=read-write. Each standby needs: ALTER SYSTEM SET sync_replication_slots ="
            " on; ALTER SYSTEM SET hot_standby_feedback = on; ALTER SYSTEM SET primary_slot_name ="
            f" '<PHYSICAL SLOT>'; {_RELOAD}; and a dbname in primary_conninfo"
        )


def _primary_warnings(connection: Connection) -> Iterator[str]:
    with source_errors("asking for standbys' slots"):
        physical = rows(connection, _PHYSICAL_SLOTS)
        listed = rows(connection, _STANDBY_SLOTS)
    if not physical:
        yield (
            "no physical replication slot exists, and a standby synchronizes slots only with one: SELECT"
            " pg_create_physical_replication_slot('<NAME>'), and set primary_slot_name of the standby to it"
        )
    if not listed:
        names = ", ".join(one_line(name) for name, is_active in physical if is_active) or "<PHYSICAL SLOT>"
        yield (
            "synchronized_standby_slots is empty: the pipeline may receive transactions that a standby has"
            " not received, and needs a new epoch if that standby is promoted. With this setting, changes are"
            " sent to the pipeline only when these standbys have them: ALTER SYSTEM SET"
            f" synchronized_standby_slots = {quote_literal(names)}; {_RELOAD}"
        )
    for name, is_active in listed:
        if not is_active:
            yield (
                f"synchronized_standby_slots lists {one_line(name)}, which no standby reads: the pipeline"
                " receives nothing until one does. Start that standby, or list others: ALTER SYSTEM SET"
                f" synchronized_standby_slots = '<PHYSICAL SLOT>'; {_RELOAD}"
            )


def _standbys(connection: Connection) -> Iterator[tuple[str, Connection]]:
    """Yield the standbys among the other hosts of the connection string, those that can be reached."""
    for host, dsn in other_hosts(connection):
        try:
            standby = connect(dsn, "standby", read_only=True)
        except PgReplError as error:
            log.info("host %s was not checked: %s", host, error.message)
            continue
        if read_server(standby).in_recovery:
            yield host, standby
        else:
            standby.close()


def _standby_warnings(host: str, standby: Connection, at_primary: Slot | None) -> Iterator[str]:
    with source_errors("asking a standby for its settings"):
        syncs, feedback, slot_name, wal_level = row(standby, _STANDBY)
    wanted = {
        "sync_replication_slots": (syncs == "on", "on", "it synchronizes no slots"),
        "hot_standby_feedback": (
            feedback == "on",
            "on",
            "the primary may remove rows of the catalog that a synchronized slot needs",
        ),
        "primary_slot_name": (
            bool(slot_name),
            "'<PHYSICAL SLOT>'",
            "it synchronizes slots only with a physical slot at the primary",
        ),
        "wal_level": (wal_level == "logical", "logical", "its slots cannot be read after its promotion"),
    }
    for setting, (is_set, value, why) in wanted.items():
        if not is_set:
            end = "restart it" if setting == "wal_level" else _RELOAD
            yield (
                f"standby {host}: {setting} must be {value}, because otherwise {why}: ALTER SYSTEM SET"
                f" {setting} = {value}; {end}"
            )
    if at_primary is None or not at_primary.failover or not all(is_set for is_set, *_ in wanted.values()):
        return
    copied = read_slot(standby, at_primary.name)
    if copied is None or not copied.synced:
        yield (
            f"standby {host}: slot {at_primary.name} is not synchronized yet: look for the reason in its log,"
            " such as a primary_conninfo without dbname, or an older slot of this name there"
        )
