"""The source server: its identity, timelines and WAL position, and its setting `synchronous_standby_names`.

A standby that is promoted continues its primary's WAL up to a switch point, and from there on a timeline of
its own. The server sends the history of its timeline over a replication connection.
https://www.postgresql.org/docs/current/protocol-replication.html

`synchronous_standby_names` names standbys by application name, or all by `*`, and includes walsenders of
logical slots. If it covers a pipeline's walsender, commits of the application wait until the pipeline has
confirmed them, and without end while it is stopped. The role may not see sync_state in pg_stat_replication,
but every role sees the setting.
https://www.postgresql.org/docs/current/runtime-config-replication.html#GUC-SYNCHRONOUS-STANDBY-NAMES
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from types import MappingProxyType
from typing import Protocol

import psycopg2.errors

from airflow_provider_pgrepl.errors import SourceConnectionError, one_line
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

from .connection import Connection, application_name, connect_replication, row, server_dsn, stream_role
from .server_errors import source_errors
from .slot import Slot

_SERVER = """
SELECT pg_catalog.current_setting('server_version_num')::int,
    (SELECT system_identifier::text FROM pg_catalog.pg_control_system()),
    CASE WHEN pg_catalog.pg_is_in_recovery()
        THEN coalesce((SELECT received_tli FROM pg_catalog.pg_stat_get_wal_receiver()),
                      (SELECT timeline_id FROM pg_catalog.pg_control_checkpoint()))
        ELSE ('x' || pg_catalog.substr(pg_catalog.pg_walfile_name(pg_catalog.pg_current_wal_insert_lsn()),
                                       1, 8))::bit(32)::int
    END,
    coalesce(pg_catalog.current_setting('effective_wal_level', true),
             pg_catalog.current_setting('wal_level')),
    pg_catalog.pg_is_in_recovery(), d.datname::text, d.oid::bigint
FROM pg_catalog.pg_database d WHERE d.datname = pg_catalog.current_database()
"""

_FLUSH_WAIT_S, _FLUSH_LIMIT_S = 1.0, 120.0
_WAL_PAGE, _PAGE_HEADER, _FIRST_PAGE_HEADER = 8192, 24, 40
_COMMIT_CLOCK = """
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_xact_replay_timestamp()
    ELSE pg_catalog.clock_timestamp() END
"""
_SEGMENT_SIZE = "SELECT setting FROM pg_catalog.pg_settings WHERE name = 'wal_segment_size'"
_SETTING = "SELECT pg_catalog.current_setting('synchronous_standby_names')"
# The second setting exists since PostgreSQL 18. Their units are MiB and seconds.
_SLOT_LIMITS = """
SELECT max(setting::bigint) FILTER (WHERE name = 'max_slot_wal_keep_size'),
    pg_catalog.current_setting('max_slot_wal_keep_size', true),
    max(setting::bigint) FILTER (WHERE name = 'idle_replication_slot_timeout'),
    pg_catalog.current_setting('idle_replication_slot_timeout', true)
FROM pg_catalog.pg_settings WHERE name IN ('max_slot_wal_keep_size', 'idle_replication_slot_timeout')
"""
_METHOD = re.compile(r"\s*(?:(?:first|any)\s+)?\d+\s*\((.*)\)\s*$", re.IGNORECASE | re.DOTALL)
_NAME = re.compile(r'"((?:[^"]|"")*)"|([^\s,"]+)')


@dataclass(frozen=True)
class Server:
    """The identity of a PostgreSQL cluster and one of its databases.

    A copy of the server's files has the same `system_identifier`, and the same `timeline` until it is
    promoted.
    """

    version_num: int
    system_identifier: str
    timeline: int
    wal_level: str
    in_recovery: bool
    database: str
    database_oid: int


def read_server(connection: Connection) -> Server:
    """Return the server and the database that a connection leads to. Raises SourceError."""
    with source_errors("asking the server who it is"):
        return Server(*row(connection, _SERVER))


def written_lsn(connection: Connection) -> LSN:
    """Return the LSN of the source's next WAL record, or the replay LSN on a standby."""
    with source_errors("asking for the WAL position"):
        if row(connection, "SELECT pg_catalog.pg_is_in_recovery()")[0]:
            return LSN.parse(row(connection, "SELECT pg_catalog.pg_last_wal_replay_lsn()::text")[0])
        return LSN.parse(row(connection, "SELECT pg_catalog.pg_current_wal_insert_lsn()::text")[0])


def read_commit_clock(connection: Connection) -> datetime | None:
    """Return a time by which the commits that `wal_lsn` covers, if it is called next, can be bounded.

    That is the server's clock, or on a standby the commit time of the last replayed transaction. None on a
    standby that has replayed none.
    """
    with source_errors("asking for the time"):
        found: datetime | None = row(connection, _COMMIT_CLOCK)[0]
    return found


def wal_lsn(connection: Connection) -> LSN:
    """Return an LSN at or after every transaction committed before this call, which a walsender will reach.

    That is the end of the last WAL record written now, after it is flushed. The flush LSN cannot be used: it
    may be inside a record, and a walsender stops before that record. On a standby, return the replay LSN.
    """
    written = written_lsn(connection)
    with source_errors("asking for the WAL position"):
        if row(connection, "SELECT pg_catalog.pg_is_in_recovery()")[0]:
            return written
        _wait_until_flushed(connection, written)
        segment = int(row(connection, _SEGMENT_SIZE)[0])
    return LSN(end_of_last_record(written, segment))


def _wait_until_flushed(connection: Connection, lsn: LSN) -> None:
    """Wait until the WAL is flushed up to `lsn`. Raises SourceConnectionError after 120 s."""
    began = time.monotonic()
    next_commit = began + _FLUSH_WAIT_S
    while LSN.parse(row(connection, "SELECT pg_catalog.pg_current_wal_flush_lsn()::text")[0]) < lsn:
        now = time.monotonic()
        if now - began > _FLUSH_LIMIT_S:
            raise SourceConnectionError(f"the source has not flushed its WAL up to {lsn} in time")
        if now >= next_commit:
            # Records of an open transaction are flushed with the next commit. This statement commits a
            # transaction with an xid, which the WAL writer flushes. Without the right, the flush comes later.
            with suppress(psycopg2.errors.InsufficientPrivilege):
                row(connection, "SELECT pg_catalog.pg_current_xact_id()::text")
            next_commit = now + _FLUSH_WAIT_S
        time.sleep(0.02)


def end_of_last_record(insert_lsn: int, segment: int) -> int:
    """Return the end of the last WAL record for an insert LSN.

    At the start of a page, the server shows the insert LSN after the header that the page will have:
    https://github.com/postgres/postgres/blob/REL_18_STABLE/src/backend/access/transam/xlog.c
    (XLogBytePosToRecPtr). No record can end right there; one may end 16 bytes after a short header.
    """
    page = insert_lsn - insert_lsn % _WAL_PAGE
    header = _FIRST_PAGE_HEADER if page % segment == 0 else _PAGE_HEADER
    return page if insert_lsn - page == header else insert_lsn


@dataclass(frozen=True)
class SlotLimits:
    """The settings by which the server invalidates a slot. None: it does not, or has no such setting.

    `wal_keep_shown`, `idle_shown`: the values as the server shows them.
    """

    wal_keep_bytes: int | None
    wal_keep_shown: str
    idle_s: int | None
    idle_shown: str


def read_slot_limits(connection: Connection) -> SlotLimits:
    """Return the server's limits for slots. Raises SourceError."""
    with source_errors("asking for limits of slots"):
        kept, kept_shown, idle, idle_shown = row(connection, _SLOT_LIMITS)
    kept_bytes = None if kept is None or kept < 0 else kept << 20
    return SlotLimits(kept_bytes, kept_shown or "", idle or None, idle_shown or "")


def names_standby(setting: str, application: str) -> bool:
    """Return True if a value of `synchronous_standby_names` covers a walsender of this application name."""
    method = _METHOD.match(setting)
    for quoted, plain in _NAME.findall(method[1] if method else setting):
        # A quoted * looks like a name, but the server treats it as the wildcard as well.
        name = quoted.replace('""', '"') or plain
        if name == "*" or name.lower() == application.lower():
            return True
    return False


def is_synchronous(connection: Connection, slot: str) -> bool:
    """Return True if commits at the source may wait for the walsender of this slot."""
    return names_standby(_read(connection), application_name(stream_role(slot)))


def synchronous_problem(connection: Connection, slot: str) -> str | None:
    """Return how the setting delays commits, and the remedy; None if it does not cover the walsender."""
    setting = _read(connection)
    application = application_name(stream_role(slot))
    if not names_standby(setting, application):
        return None
    return (
        f"synchronous_standby_names of the source ({one_line(setting)}) covers this pipeline's walsender"
        f" (application name {application!r}): commits at the source may wait until it has confirmed"
        " them, and without end while it is stopped. List only physical standbys that are connected"
        " (application_name in pg_stat_replication), because commits wait for listed ones: ALTER SYSTEM SET"
        " synchronous_standby_names = 'ANY 1 (<NAME>, <NAME>)'; SELECT pg_reload_conf()"
    )


def _read(connection: Connection) -> str:
    with source_errors("asking for synchronous_standby_names"):
        setting: str = row(connection, _SETTING)[0]
    return setting


class SourceRecord(Protocol):
    """The fields of a changelog's or a state's record that identify a source."""

    @property
    def system_identifier(self) -> str: ...
    @property
    def database(self) -> str: ...
    @property
    def database_oid(self) -> int: ...
    @property
    def slot(self) -> str: ...


@dataclass(frozen=True)
class KnownSource:
    """A server and a database. `database_oid` is 0 if only the name is known, or neither."""

    system_identifier: str
    database: str
    database_oid: int

    @property
    def name(self) -> str:
        """Return the name by which `--give-up` identifies this source."""
        return f"{self.system_identifier}/{self.database}" if self.database else self.system_identifier

    def differs(self, server: Server) -> bool:
        """Return True if the server, or its database, is another one.

        Databases are compared by oid if it is known, because a database may be renamed.
        """
        if self.system_identifier != server.system_identifier:
            return True
        if self.database_oid:
            return self.database_oid != server.database_oid
        return bool(self.database) and self.database != server.database

    def kind_of(self, server: Server) -> str:
        """Return "server" or "database of that server": the part in which another source differs."""
        is_server = self.system_identifier != server.system_identifier
        return "server" if is_server else "database of that server"

    def __str__(self) -> str:
        server = f"the server of system identifier {self.system_identifier}"
        return f"database {self.database} of {server}" if self.database else server


def source_of(server: Server) -> KnownSource:
    """Return the source that a connection leads to, from its server."""
    return KnownSource(server.system_identifier, server.database, server.database_oid)


def known_source(
    record: SourceRecord, server: Server, slots: Mapping[str, Slot] = MappingProxyType({})
) -> KnownSource:
    """Return the source of a record.

    If the record has no database, the database of the record's slot is used, if this is the recorded server.
    """
    slot = slots.get(record.slot) if record.system_identifier == server.system_identifier else None
    database = record.database or (slot.database if slot is not None else None) or ""
    return KnownSource(record.system_identifier, database, record.database_oid)


def find_fork(connection: Connection, server: Server, timeline: int) -> LSN | None:
    """Return the LSN up to which the connected server has the WAL of an earlier timeline of its history.

    Returns None if the server is on `timeline`, if that timeline is no earlier one of its history, or if the
    server is a standby. Raises SourceError.
    """
    if server.in_recovery or timeline >= server.timeline:
        return None
    return parse_history(_read_history(connection, server)).get(timeline)


def _read_history(connection: Connection, server: Server) -> str:
    with (
        closing(connect_replication(server_dsn(connection), "timelines")) as replication,
        source_errors("reading the history of the server's timelines"),
    ):
        check_identity(server, *row(replication, "IDENTIFY_SYSTEM")[:2])
        try:
            content = row(replication, f"TIMELINE_HISTORY {server.timeline}")[1]
        except psycopg2.errors.UndefinedFile:
            # The first timeline has no history; without a history nothing is proven.
            return ""
    return content if isinstance(content, str) else bytes(content).decode()


def check_identity(server: Server, system_identifier: str, timeline: int) -> None:
    """Raise SourceConnectionError if a replication connection leads to another server, or to a copy of it.

    Both connections resolve the server's name, which may lead to another server in between. The timeline of a
    standby is not compared: it can change at any time.
    """
    found = (str(system_identifier), int(timeline))
    expected = (server.system_identifier, int(timeline) if server.in_recovery else server.timeline)
    if found != expected:
        raise SourceConnectionError(
            f"the replication connection has reached another server (system identifier {found[0]}, timeline"
            f" {found[1]}) than the connection for queries ({expected[0]}, timeline {expected[1]})",
            "nothing needs to be done if the source is failing over: the connection is tried again",
        )


def parse_history(text: str) -> dict[int, LSN]:
    """Return the switch point of each earlier timeline in a history file.

    A line has the timeline, the LSN at which it ended, and a reason, separated by tabs.
    """
    lines = (line.split(None, 2) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {int(fields[0]): LSN.parse(fields[1]) for fields in lines}
