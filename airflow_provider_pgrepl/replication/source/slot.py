"""A replication slot as the server lists it: read, advanced and dropped.

`SlotInUse` keeps the server from invalidating a slot that no session reads during a long copy. PostgreSQL 18
and later can invalidate slots after an idle timeout. The idle time of a slot begins when it is released.
https://www.postgresql.org/docs/18/runtime-config-replication.html#GUC-IDLE-REPLICATION-SLOT-TIMEOUT
"""

from __future__ import annotations

import logging
import time
from contextlib import closing
from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError, PgReplError, SlotError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.host import BlockThread

from .connection import Connection, connect, current_database, patience, row, rows
from .server_errors import source_errors

PLUGIN = "pgoutput"
READING_WAL_S = 3600.0
"""The seconds that advancing or peeking at a slot may take: the server reads the WAL that it retains."""

_SLOT = """
SELECT slot_name::text, plugin::text, database::text, active, active_pid, confirmed_flush_lsn::text,
    restart_lsn::text, wal_status,
    coalesce(pg_catalog.to_jsonb(s) ->> 'invalidation_reason',
             CASE WHEN wal_status = 'lost' THEN 'wal_removed'
                  WHEN pg_catalog.to_jsonb(s) ->> 'conflicting' = 'true' THEN 'conflict' END),
    coalesce((pg_catalog.to_jsonb(s) ->> 'failover')::boolean, false),
    coalesce((pg_catalog.to_jsonb(s) ->> 'synced')::boolean, false)
FROM pg_catalog.pg_replication_slots s WHERE slot_name = %s
"""
_WAL_LIMIT = "SELECT setting::bigint FROM pg_catalog.pg_settings WHERE name = 'max_slot_wal_keep_size'"
_INVALIDATING_SETTINGS = {
    "wal_removed": "max_slot_wal_keep_size",
    "idle_timeout": "idle_replication_slot_timeout",
    "wal_level_insufficient": "wal_level",
}
"""The server setting for each reason why a slot is invalidated.

https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""
log = logging.getLogger(__name__)
_INVALIDATES_SINCE = {14: 140018, 15: 150013, 16: 160009, 17: 170005}
"""By major version, the release from which a commit that alters the catalog also invalidates the cache of a
walsender that decodes transactions begun earlier. Versions from 18 on always do."""
PREFIX = "pgrepl_tmp_"
"""The prefix of temporary slots. The pid of this package's session follows: the snapshot app's, or the one
that creates a slot."""
_LINGERING = """
SELECT s.slot_name::text, s.active_pid
FROM pg_catalog.pg_replication_slots s
    LEFT JOIN pg_catalog.pg_stat_activity a
        ON a.pid::text = pg_catalog.substr(s.slot_name::text, pg_catalog.length(%(prefix)s) + 1)
WHERE s.temporary AND pg_catalog.starts_with(s.slot_name::text, %(prefix)s)
    AND s.database = pg_catalog.current_database()
    AND NOT (coalesce(a.application_name, '') ~ '^pgrepl (snapshot|verify) '
        AND a.application_name <> ALL (%(own)s::text[]))
ORDER BY 1
"""
_MOST_S = 600.0
"""The most seconds between two reads of the server's timeout, which may be set at any time."""
_USES, _TRIES = 2, 8
"""How often the slot is used within the timeout, and how often a use is tried. Each use decodes from the
slot's restart_lsn, which is far back while a transaction is open for long."""
_LEAVING_S = 1.0
_TIMEOUT = "SELECT setting::float FROM pg_catalog.pg_settings WHERE name = 'idle_replication_slot_timeout'"


@dataclass(frozen=True)
class Slot:
    """A row of pg_replication_slots.

    https://www.postgresql.org/docs/current/view-pg-replication-slots.html

    :param name: `slot_name`
    :param plugin: the output plugin, None for a physical slot
    :param database: the database of a logical slot
    :param active: True while a walsender reads the slot
    :param active_pid: the pid of that walsender
    :param confirmed_flush_lsn: the confirmed LSN; None for a physical slot
    :param restart_lsn: the oldest LSN whose WAL the slot retains; None if it has reserved none
    :param wal_status: `reserved`, `extended`, `unreserved` or `lost`
    :param invalidation: the reason why the slot can never be used again, or None
    :param failover: True if standbys may synchronize the slot; False before PostgreSQL 17
    :param synced: True if this server synchronized the slot from a primary, also after it was promoted; False
        before PostgreSQL 17
    """

    name: str
    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    confirmed_flush_lsn: LSN | None
    restart_lsn: LSN | None
    wal_status: str | None
    invalidation: str | None
    failover: bool = False
    synced: bool = False

    def held_bytes(self, end: LSN) -> int | None:
        """Return the bytes of WAL before `end` that the server retains for the slot; 0 if it is invalidated.

        Returns None if the slot has no restart_lsn.
        """
        if self.invalidation:
            return 0
        return None if self.restart_lsn is None else max(0, end - self.restart_lsn)


def read_wal_limit(connection: Connection) -> int | None:
    """Return the bytes of WAL that the server retains for a slot at most; None without a limit."""
    with source_errors("reading max_slot_wal_keep_size"):
        (megabytes,) = row(connection, _WAL_LIMIT)
    return None if megabytes < 0 else int(megabytes) << 20


def read_slot(connection: Connection, name: str) -> Slot | None:
    """Return the slot of this name, in any database, or None if there is none."""
    with source_errors(f"reading slot {name}"):
        found = rows(connection, _SLOT, (name,))
    if not found:
        return None
    slot, plugin, database, active, pid, confirmed, restart, *state = found[0]
    return Slot(slot, plugin, database, active, pid, _lsn(confirmed), _lsn(restart), *state)


def why_invalidated(connection: Connection, slot: Slot) -> str:
    """Return in a sentence why the server invalidated a slot, with the setting that made it do so."""
    text = f"the server has invalidated the replication slot {slot.name} ({slot.invalidation}"
    setting = _INVALIDATING_SETTINGS.get(slot.invalidation or "")
    if setting is not None:
        with source_errors(f"reading {setting}"):
            (value,) = row(connection, "SELECT pg_catalog.current_setting(%s, true)", (setting,))
        text += f"; {setting} is {value}"
    return f"{text}): it no longer keeps the changes that are missing"


def reason_to_keep(connection: Connection, slot: Slot) -> str | None:
    """Return why a slot cannot be a pipeline's, nor become one; None for a pgoutput slot of this database.

    A server drops a logical slot from any of its databases, so the name alone proves nothing.
    """
    if slot.plugin is None:
        return "it is a physical slot"
    if slot.plugin != PLUGIN:
        return f"its plugin is {slot.plugin}"
    is_here = slot.database == current_database(connection)
    return None if is_here else f"it belongs to database {slot.database}"


def drop_slot(connection: Connection, name: str) -> None:
    """Drop the slot `name`. Does nothing if it does not exist.

    Raises BusyError while a walsender is reading it, SlotError for a slot of another database, which the
    server would drop as well, or for a physical one.
    """
    found = read_slot(connection, name)
    if found is None:
        return
    here = current_database(connection)
    if found.database != here:
        place = f"belongs to database {found.database}" if found.database else "is a physical slot"
        raise SlotError(
            f"slot {name} {place}, and the connection leads to database {here}: it was not dropped",
            "check the connection (conn_id, or PGREPL_DSN)",
        )
    try:
        with source_errors(f"dropping slot {name}"):
            try:
                rows(connection, "SELECT pg_catalog.pg_drop_replication_slot(%s)", (name,))
            except psycopg2.errors.UndefinedObject:
                return
    except PgReplError:
        slot = read_slot(connection, name)
        if slot is not None and slot.active:
            raise BusyError(
                f"slot {name} is read by pid {slot.active_pid}, and cannot be dropped",
                "stop the replication app first",
            ) from None
        raise


def advance_slot(connection: Connection, name: str, lsn: LSN) -> None:
    """Advance the slot to `lsn`, so that changes that committed before it are not sent any more.

    The caller must have all these changes in the changelog, or need none because no copy was begun: see the
    rules in CONTRIBUTING. Raises BusyError while a session reads the slot.
    """
    with source_errors(f"moving slot {name}"), patience(connection, READING_WAL_S):
        try:
            rows(
                connection, "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(lsn))
            )
        except psycopg2.errors.ObjectInUse:
            raise BusyError(
                f"slot {name} cannot be advanced while a walsender reads it", "stop the replication app first"
            ) from None


def _lsn(text: str | None) -> LSN | None:
    return None if text is None else LSN.parse(text)


def notices_altered_publications(server_version: int) -> bool:
    """Return True if this server's walsenders notice an ALTER PUBLICATION in transactions begun before it."""
    return server_version >= _INVALIDATES_SINCE.get(server_version // 10000, 0)


def renew_walsender(connection: Connection, slot: str) -> bool:
    """End the slot's walsender if it may have an outdated publication cached. Return True if one was ended.

    The reader of the slot connects again. Nothing is lost: the slot retains the changes not confirmed.
    """
    if notices_altered_publications(connection.server_version):
        return False
    found = read_slot(connection, slot)
    if found is None or found.active_pid is None:
        return False
    with source_errors(f"ending the walsender of slot {slot}"):
        row(connection, "SELECT pg_catalog.pg_terminate_backend(%s)", (found.active_pid,))
    log.info(
        "ended the walsender (pid %d) of slot %s: walsenders of this server version may not notice"
        " tables that were added to the publication; the receiver reconnects",
        found.active_pid,
        slot,
    )
    return True


def temporary_name(connection: Connection) -> str:
    """Return the name of this session's temporary slot, of which it has at most one at a time."""
    return f"{PREFIX}{connection.info.backend_pid}"


def check_none_lingers(connection: Connection, pipeline: str) -> None:
    """Raise BusyError if a temporary slot exists that is not known to be another pipeline's."""
    own = [f"pgrepl {app} {pipeline}"[:63] for app in ("snapshot", "verify")]
    wanted = {"prefix": PREFIX, "own": own}
    with source_errors("looking for temporary slots"):
        found = rows(connection, _LINGERING, wanted)
    if found:
        listed = ", ".join(f"{name} (of pid {pid})" for name, pid in found)
        raise BusyError(
            f"temporary slots are still there: {listed}",
            "they go with their sessions: run the same again when these have ended",
        )


class SlotInUse(BlockThread):
    """A context manager whose thread regularly uses the slot `name`, if the server has an idle timeout.

    The thread uses the slot by advancing it to its confirmed LSN, which confirms nothing new. It does not use
    a slot that a receiver reads. It logs errors and continues: the copy needs no slot.
    """

    def __init__(self, dsn: str, name: str) -> None:
        super().__init__("pgrepl-slot-in-use", _LEAVING_S)
        self._dsn, self._name = dsn, name
        self._timeout_s: float | None = None
        self._used_s: float | None = None

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                with closing(connect(self._dsn, "slot in use")) as connection:
                    self._look(connection)
            except BusyError:
                self._used_s = time.monotonic()
                log.debug("slot %s is read", self._name)
            except PgReplError as error:
                log.warning(
                    "slot %s could not be kept in use: %s. If this lasts longer than"
                    " idle_replication_slot_timeout, the server invalidates the slot",
                    *(self._name, error.message),
                )
            pause_s = self._pause_s()

    def _pause_s(self) -> float:
        if self._timeout_s is None:  # not known yet
            return _MOST_S / _TRIES
        return min(_MOST_S, max(self._due_s(), self._timeout_s / _TRIES)) if self._timeout_s else _MOST_S

    def _due_s(self) -> float:
        """Return the seconds until the slot must be used, if the server has a timeout."""
        if self._used_s is None or self._timeout_s is None:
            return 0.0
        return self._used_s + self._timeout_s / _USES - time.monotonic()

    def _look(self, connection: Connection) -> None:
        """Use the slot if the server has a timeout, and half of it has passed since the last use."""
        with source_errors("asking for limits of slots"):
            self._timeout_s = next((float(setting) for (setting,) in rows(connection, _TIMEOUT)), 0.0)
        if self._timeout_s and self._due_s() <= 0:
            self._use(connection)
            self._used_s = time.monotonic()

    def _use(self, connection: Connection) -> None:
        slot = read_slot(connection, self._name)
        if slot is not None and not slot.active and not slot.invalidation and slot.confirmed_flush_lsn:
            advance_slot(connection, self._name, slot.confirmed_flush_lsn)
