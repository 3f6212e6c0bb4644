"""A replication slot as the server lists it: looked at, dropped."""

from __future__ import annotations

from dataclasses import dataclass

import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError, PgReplError, SlotError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import Connection, current_database, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.time_limit import patience

PLUGIN = "pgoutput"
READING_WAL_S = 3600.0
"""A slot is moved by reading all that it holds."""

_SLOT = """
SELECT slot_name::text, plugin::text, database::text, active, active_pid, confirmed_flush_lsn::text,
    restart_lsn::text, wal_status,
    coalesce(pg_catalog.to_jsonb(s) ->> 'invalidation_reason',
             CASE WHEN wal_status = 'lost' THEN 'wal_removed'
                  WHEN pg_catalog.to_jsonb(s) ->> 'conflicting' = 'true' THEN 'conflict' END)
FROM pg_catalog.pg_replication_slots s WHERE slot_name = %s
"""


_INVALIDATING_SETTINGS = {
    "wal_removed": "max_slot_wal_keep_size",
    "idle_timeout": "idle_replication_slot_timeout",
    "wal_level_insufficient": "wal_level",
}
"""The setting of the server behind each reason for which it invalidates slots.

https://www.postgresql.org/docs/current/view-pg-replication-slots.html
"""


@dataclass(frozen=True)
class Slot:
    """A row of pg_replication_slots. `invalidation`: why it can never be used again, else None."""

    name: str
    plugin: str | None
    database: str | None
    active: bool
    active_pid: int | None
    confirmed_flush_lsn: LSN | None
    restart_lsn: LSN | None
    wal_status: str | None
    invalidation: str | None

    def held_bytes(self, end: LSN) -> int | None:
        """How much of the WAL that ends at `end` the server keeps for it; nothing once it is invalidated."""
        if self.invalidation:
            return 0
        return None if self.restart_lsn is None else max(0, end - self.restart_lsn)


def read_slot(connection: Connection, name: str) -> Slot | None:
    """The slot of this name, in whatever database; None when there is none."""
    with source_errors(f"reading slot {name}"):
        found = rows(connection, _SLOT, (name,))
    if not found:
        return None
    slot, plugin, database, active, pid, confirmed, restart, wal_status, invalidation = found[0]
    return Slot(slot, plugin, database, active, pid, _lsn(confirmed), _lsn(restart), wal_status, invalidation)


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

    A server drops a logical slot from any of its databases, so the name is no evidence.
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
    """Have the server forget what committed before an LSN. Raises BusyError while somebody reads it.

    Whoever calls this has all of it in the changelog, or needs none of it because no copy was begun: see the
    rules in CONTRIBUTING.
    """
    with source_errors(f"moving slot {name}"), patience(connection, READING_WAL_S):
        try:
            rows(
                connection, "SELECT pg_catalog.pg_replication_slot_advance(%s, %s::pg_lsn)", (name, str(lsn))
            )
        except psycopg2.errors.ObjectInUse:
            raise BusyError(
                f"slot {name} is read by somebody, and cannot be moved", "stop the replication app first"
            ) from None


def _lsn(text: str | None) -> LSN | None:
    return None if text is None else LSN.parse(text)
