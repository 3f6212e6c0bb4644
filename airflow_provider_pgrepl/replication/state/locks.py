"""Locks on pipelines: rows that name the session that holds them, valid as long as that session lasts.

These are not advisory locks: every role that can connect could take one, and so prevent a pipeline from
starting. They are not rows locked in an open transaction either, which would hold back the source's vacuum.
An advisory lock is used only where schema `_pgrepl` is not set up and may not be created: a process gets no
further there than to report that.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_provider_pgrepl.errors import BusyError, PgReplError, one_line
from airflow_provider_pgrepl.replication.source.connection import row, rows

from . import schema
from .actor import started_by_environment
from .connection import StateConnection, state_errors

Purpose = str
"""`replicate`, `snapshot`, `verify`, `maintain`, `publication` (tables join or leave it, or are paused for a
repair), or `publish` and the publisher's name."""

_MAX_NAME = 63
_POLL_S = 0.1
_PROCESS = re.compile(r" (?P<host>[^ :]+):(?P<pid>\d+)(?:, started by .*)?$")

# A pid can be reused by a later session with another start time; in a container, where pids begin at 1, this
# happens after each restart of the server. Only a session of this database can hold a lock, and the server's
# own processes are in no database. The start time of another role's session may be hidden. Such a session
# counts as the holder, unless the lock is older than the server's start.
_HOLDS = """
a.pid = held.pid
    AND a.datid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND coalesce(a.backend_start = held.started, held.started >= pg_catalog.pg_postmaster_start_time())
"""

_TAKE = """
INSERT INTO _pgrepl.locks AS held (pipeline, purpose, pid, started, holder)
SELECT %(pipeline)s, %(purpose)s, a.pid, a.backend_start, %(holder)s
FROM pg_catalog.pg_stat_activity a WHERE a.pid = pg_catalog.pg_backend_pid()
ON CONFLICT (pipeline, purpose) DO UPDATE
    SET pid = excluded.pid, started = excluded.started, holder = excluded.holder
WHERE (held.pid, held.started) = (excluded.pid, excluded.started)
    OR (held.pid, held.started) = (%(lost_pid)s::int, %(lost_started)s::timestamptz)
    OR NOT EXISTS (SELECT FROM pg_catalog.pg_stat_activity a WHERE {holds})
RETURNING held.pid, held.started
""".replace("{holds}", _HOLDS)

_HOLDER = """
SELECT held.holder, held.pid, coalesce(a.usename, 'unknown'),
    coalesce(pg_catalog.host(a.client_addr), 'no address'), held.started::timestamptz(0)::text,
    a.pid IS NOT NULL AND a.backend_start IS NULL
FROM _pgrepl.locks held LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = held.pid
WHERE held.pipeline = %(pipeline)s AND held.purpose = %(purpose)s
"""

_RELEASE = """
DELETE FROM _pgrepl.locks WHERE (pipeline, purpose) = (%(pipeline)s, %(purpose)s)
    AND pid = pg_catalog.pg_backend_pid()
RETURNING 1
"""

_IS_HELD = """
SELECT EXISTS (SELECT FROM _pgrepl.locks held JOIN pg_catalog.pg_stat_activity a ON {holds}
    WHERE (held.pipeline, held.purpose) = (%(pipeline)s, %(purpose)s))
""".replace("{holds}", _HOLDS)

_HELD = """
SELECT held.purpose FROM _pgrepl.locks held JOIN pg_catalog.pg_stat_activity a ON {holds}
WHERE held.pipeline = %(pipeline)s AND held.pid <> pg_catalog.pg_backend_pid()
ORDER BY 1
""".replace("{holds}", _HOLDS)

_TAKE_KEY = "SELECT NULL, NULL WHERE pg_catalog.pg_try_advisory_lock(%(key)s)"
_RELEASE_KEY = "SELECT pg_catalog.pg_advisory_unlock(%(key)s)"
_KEY_HOLDER = """
SELECT a.application_name, a.pid, coalesce(a.usename, 'unknown'),
    coalesce(pg_catalog.host(a.client_addr), 'no address'), a.backend_start::timestamptz(0)::text, false
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND (l.classid::bigint << 32 | l.objid::bigint) = %(key)s
"""


@dataclass(frozen=True)
class Session:
    """A session of the state database, identified by its pid and its start time."""

    pid: int | None = None
    started: datetime | None = None


@dataclass(frozen=True)
class _Lock:
    """A lock and its parameters in statements. `by_row`: it is a row, not an advisory lock."""

    pipeline: str
    purpose: Purpose
    by_row: bool

    @property
    def values(self) -> dict[str, object]:
        name = f"pgrepl {self.purpose} {self.pipeline}"
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        holder = f"{name} {socket.gethostname()}:{os.getpid()}"
        if started_by := started_by_environment():
            holder += f", started by {started_by}"
        key = int.from_bytes(digest) >> 1
        return {"pipeline": self.pipeline, "purpose": self.purpose, "holder": holder, "key": key}


class PipelineLocks(StateConnection):
    """The locks that this connection holds. They end with the connection, however that ends."""

    def __init__(self, dsn: str, role: str, started_by: str = "") -> None:
        super().__init__(dsn, role, started_by)
        self._locks: set[_Lock] = set()
        self.session = Session()
        """The session in the row of the last lock; empty for an advisory lock."""

    def lock(self, pipeline: str, purpose: Purpose, lost: Session | None = None) -> None:
        """Take the pipeline's lock for this purpose until `unlock` or `close`. An existing schema is first
        migrated to this version.

        `lost`: a session of this process whose connection was lost. The server may not have noticed that yet,
        so the lock is taken over from this session. Raises BusyError, which names the holder. The lock only
        avoids accidents: a second writer is fenced in the lake.
        """
        lost = lost or Session()
        is_set_up = schema.is_set_up(self._connection)
        if is_set_up:
            schema.migrate(self._connection)
        wanted = _Lock(pipeline, purpose, by_row=is_set_up)
        take, holder = (_TAKE, _HOLDER) if is_set_up else (_TAKE_KEY, _KEY_HOLDER)
        name = str(wanted.values["holder"])[:_MAX_NAME]
        with state_errors("taking the pipeline's lock"):
            row(self._connection, "SELECT pg_catalog.set_config('application_name', %s, false)", (name,))
            values = {**wanted.values, "lost_pid": lost.pid, "lost_started": lost.started}
            taken = rows(self._connection, take, values)
            holders = [] if taken else rows(self._connection, holder, wanted.values)
        if not taken:
            raise _busy(pipeline, purpose, holders)
        self.session = Session(*taken[0])
        self._locks.add(wanted)

    @contextmanager
    def locked(self, pipeline: str, purpose: Purpose, timeout_s: float) -> Iterator[None]:
        """Hold a lock during the block. Raises BusyError if the lock is not free within `timeout_s`
        seconds."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self.lock(pipeline, purpose)
                break
            except BusyError:
                if time.monotonic() >= deadline:
                    raise
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            self.unlock(pipeline, purpose)

    def is_locked(self, pipeline: str, purpose: Purpose) -> bool:
        """Return True if a process holds the lock now. Takes no lock. The schema must be set up."""
        with state_errors("looking at the pipeline's lock"):
            values = {"pipeline": pipeline, "purpose": purpose}
            return bool(row(self._connection, _IS_HELD, values)[0])

    def check_unlocked(self, pipeline: str, purpose: Purpose) -> None:
        """Raise BusyError if a process holds the lock now. Takes no lock, and does nothing if the schema is
        not set up."""
        if not schema.is_set_up(self._connection) or not self.is_locked(pipeline, purpose):
            return
        with state_errors("looking at the pipeline's lock"):
            holders = rows(self._connection, _HOLDER, {"pipeline": pipeline, "purpose": purpose})
        raise _busy(pipeline, purpose, holders)

    def held_by_others(self, pipeline: str) -> list[Purpose]:
        """Return the purposes for which other sessions hold locks of the pipeline now; none if the schema is
        not set up."""
        if not schema.is_set_up(self._connection):
            return []
        with state_errors("looking at the pipeline's locks"):
            return [purpose for (purpose,) in rows(self._connection, _HELD, {"pipeline": pipeline})]

    def unlock(self, pipeline: str, purpose: Purpose) -> None:
        """Release a lock that `lock` took."""
        for held in [one for one in self._locks if (one.pipeline, one.purpose) == (pipeline, purpose)]:
            self._locks.discard(held)
            with state_errors("releasing the pipeline's lock"):
                rows(self._connection, _RELEASE if held.by_row else _RELEASE_KEY, held.values)

    def close(self) -> None:
        """Release the locks and close the connection. Can be called again."""
        # Release the locks explicitly: the next process may start before the server notices that this session
        # ended.
        with suppress(PgReplError):
            for held in list(self._locks):
                self.unlock(held.pipeline, held.purpose)
        super().close()


def _busy(pipeline: str, purpose: Purpose, holders: list[tuple[Any, ...]]) -> BusyError:
    who = "; ".join(
        one_line(f"{holder} (database pid {pid}, role {role}, from {address}, since {since})")
        for holder, pid, role, address, since, _ in holders
    )
    ways = [_how_to_stop(holder) for holder, *_ in holders]
    hint = (
        "if that process is the wanted one, nothing is to be done here. Otherwise"
        f" {'; '.join(ways) or 'stop it'}, or wait until it has ended"
    )
    for _, pid, role, *_, is_hidden in holders:
        if is_hidden:
            hint += (
                f". If it no longer runs, pid {pid} is another session, of role {role}, and this role may not"
                " see when it began: GRANT pg_read_all_stats to this role, or wait until that session ends"
            )
    return BusyError(
        f"pipeline {pipeline}: another process is at it already ({purpose}): {who or 'it has just ended'}",
        hint,
    )


def _how_to_stop(holder: str) -> str:
    found = _PROCESS.search(holder)
    if found is None:
        return "stop it"
    command = f"kill {found['pid']}"
    return f"to stop it, pause its DAG and mark its run as failed, or run on host {found['host']}: {command}"
