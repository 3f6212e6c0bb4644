"""A thread that gives way as soon as a session of the source waits for the copy.

Sessions of the source that wait for a lock which sessions of a copy hold.
While such a session waits for ACCESS EXCLUSIVE, every later statement on the table waits behind it. The
server's deadlock detector does not help: the copy's sessions wait for each other outside the server.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import psycopg2

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError, one_line
from airflow_provider_pgrepl.replication.source.connection import (
    ANSWER_LIMIT_S,
    Connection,
    application_name,
    row,
    rows,
)
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import Gate, lost
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors
from airflow_provider_pgrepl.trace import log_unexpected

# pg_stat_activity is read once a transaction, unless told otherwise; what it hides from the role is NULL.
_REFRESH = "SELECT pg_catalog.pg_stat_clear_snapshot();"
_COPIES = """
SELECT pid FROM pg_catalog.pg_stat_activity WHERE application_name = %(copies)s AND usename = session_user
"""
_WAITERS = """{refresh}
WITH ours (pid) AS (SELECT pg_catalog.pg_backend_pid() UNION SELECT unnest(%(pids)s::int[]) UNION {copies})
SELECT DISTINCT ON (w.pid) w.pid, a.usename::text, a.application_name, w.mode,
    CASE WHEN {replay} THEN 'standby replay' ELSE a.query END,
    w.locktype = 'virtualxid' OR w.mode = 'AccessExclusiveLock'
FROM pg_catalog.pg_locks w LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = w.pid
WHERE NOT w.granted AND w.locktype IN ('relation', 'virtualxid') AND w.pid NOT IN (SELECT pid FROM ours)
    AND (pg_catalog.pg_blocking_pids(w.pid) && ARRAY(SELECT pid FROM ours) OR {replay})
"""
# Replay of DDL waits for a lock like a session, but is no backend of which pg_blocking_pids knows. No session
# of a standby can ask for this mode. Queries of the table queue behind it. It can be an index that is waited
# for: planning a query locks the indexes of the table.
_REPLAY = """(pg_catalog.pg_is_in_recovery() AND w.mode = 'AccessExclusiveLock' AND EXISTS (
        SELECT FROM pg_catalog.pg_locks held JOIN ours ON ours.pid = held.pid WHERE held.granted
            AND held.locktype = 'relation' AND held.database = w.database AND held.relation = w.relation))"""
_END_COPIES = "{refresh} SELECT pg_catalog.pg_terminate_backend(c.pid, {patience}) FROM ({copies}) AS c"
_ACT_AS = "SELECT current_user::text, pg_catalog.set_config('role', %s, true)"

_ENDING_MS = 2000

# Two words at most: the statement's text may hold values.
_COMMAND = re.compile(r"\s*([A-Za-z]+(?:\s+[A-Za-z]+)?)")
log = logging.getLogger(__name__)
POLL_S = 0.25
"""How long a statement of the source waits for the copy at most, and the time that ending the copy takes."""


@dataclass(frozen=True)
class LockWaiter:
    """A session that waits. `command`: the first words of its statement, if the role may see it.

    `ends_copy`: it waits for the snapshot or for ACCESS SHARE, which every copy needs; otherwise for the lock
    against code of the table's owner.
    """

    pid: int
    role: str
    application: str
    mode: str
    command: str
    ends_copy: bool

    def __str__(self) -> str:
        command = self.command or "a statement"
        return one_line(
            f"{command} of pid {self.pid} (role {self.role}, application"
            f" {self.application or 'unnamed'}, waiting for {self.mode})"
        )


def copy_role(snapshot: str) -> str:
    """Return the role of the sessions that copy under a snapshot: its name is of one table's gate."""
    return f"copy {snapshot}"


def read_waiters(connection: Connection, pids: Iterable[int] = (), snapshot: str = "") -> list[LockWaiter]:
    """Return the sessions that wait for this one, for `pids`, or for a copy under `snapshot`.

    Waits for locks on relations count, and waits for a transaction's end, as of CREATE INDEX CONCURRENTLY.
    On a standby, replay that waits for a relation that one of them has locked counts.
    """
    with source_errors("looking for sessions that wait for the copy"):
        found = rows(connection, _filled(_WAITERS), {"pids": list(pids), **_copies(snapshot)})
    return [
        LockWaiter(pid, role or "unknown", application or "", mode, _command(query or ""), ends_copy)
        for pid, role, application, mode, query, ends_copy in found
    ]


def end_copies(connection: Connection, snapshot: str) -> None:
    """End the sessions that copy under a snapshot, and wait until they are gone.

    A cancel would not reach a session whose client reads nothing.
    """
    with source_errors("ending the copies of a table"):
        # A session belongs to the role that logged in. Another one that it acts as may not end it.
        acting = row(connection, _ACT_AS, ("none",))[0]
        rows(connection, _filled(_END_COPIES), _copies(snapshot))
        row(connection, _ACT_AS, (acting,))


def _copies(snapshot: str) -> dict[str, str]:
    return {"copies": application_name(copy_role(snapshot))}


def _filled(query: str) -> str:
    return query.format(refresh=_REFRESH, copies=_COPIES, patience=_ENDING_MS, replay=_REPLAY)


def _command(query: str) -> str:
    found = _COMMAND.match(query)
    return " ".join(found[1].upper().split()) if found else ""


class LockWatch:
    """Watches a session that holds a snapshot, and locks, in a transaction of `connection`.

    `failure` is what ended it early. `name` and `kind`: of what is given up, and the error that says so.
    `gate`: the session that exports the snapshot to copies, which ends first: then no more of them can begin.
    `release`: releases the lock that not every copy needs. It is lent to a statement that waits for no other:
    the copies that run are ended, and others can begin after `resume`.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        kind: type[SnapshotError] = SnapshotError,
        gate: Gate | None = None,
        release: Callable[[Connection], None] | None = None,
    ) -> None:
        self.failure: PgReplError | None = None
        self.is_lent = False
        self.turn = threading.Lock()
        """Held by the thread that uses the connection, which may be in a transaction that failed."""
        self._release = release
        self._connection = connection
        self._name = name
        self._kind = kind
        self._gate = gate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lock watch {name}", daemon=True)

    def start(self) -> None:
        """Begin to watch, until `close`, or until the session has given way."""
        self._thread.start()

    def check(self) -> None:
        """Raise an error of `kind` if the session has given way, or was lost."""
        self.raise_failure()
        try:
            with self.turn:
                row(self._connection, "SELECT 1")
        except psycopg2.Error as error:
            # It may have given way between the two.
            raise self.failure or lost(describe(error), self._kind) from None

    def raise_failure(self) -> None:
        """Raise the error of a session that has given way."""
        if self.failure is not None:
            raise self.failure

    def resume(self, gate: Gate) -> None:
        """Let copies begin again, at another gate; to be called with `turn` and the lock taken back."""
        self._gate, self.is_lent = gate, False

    def close(self) -> None:
        """Stop watching, and end the session. Can be called again."""
        self._stop.set()
        if self._thread.ident is not None:
            # A connection is not closed under the thread that uses it.
            self._thread.join(ANSWER_LIMIT_S)
        self._shut_gate()
        self._connection.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(POLL_S):
                with self.turn:
                    waiters = self._read_waiters()
                    if any(waiter.ends_copy or self._release is None for waiter in waiters):
                        self._give_way("; ".join(map(str, waiters)))
                        return
                    if waiters and self._release is not None and not self.is_lent:
                        self._lend("; ".join(map(str, waiters)), self._release)
        except PgReplError as error:
            self._give_up(error.message)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody watches any more
            if not self._stop.is_set():
                log_unexpected(log, f"watching the locks of {self._name}", error)
            self._give_up(type(error).__name__)

    def _give_up(self, reason: str) -> None:
        """End the session: without a watch no lock is held."""
        if not self._stop.is_set():
            self.failure = self.failure or lost(reason, self._kind)
        self._shut_gate()
        with contextlib.suppress(psycopg2.Error):
            self._connection.close()

    def _read_waiters(self) -> list[LockWaiter]:
        if self._gate is None:
            return read_waiters(self._connection)
        if not self.is_lent:
            self._gate.keep_open()
        return read_waiters(self._connection, [self._gate.pid], self._gate.snapshot)

    def _give_way(self, waiters: str) -> None:
        self.failure = self._kind(
            f"{self._name}: the copy was given up for {waiters}",
            "nothing needs to be done: it is copied again under a new snapshot. If this repeats, run the"
            " snapshot when no DDL runs on the table",
        )
        log.warning("%s", self.failure.message)
        self._end_copies()
        # The connection stays open for the thread that uses it: what it reads is not used any more.
        with source_errors("releasing the locks of a copy"):
            self._connection.cursor().execute("ROLLBACK")

    def _lend(self, waiters: str, release: Callable[[Connection], None]) -> None:
        log.info("%s: ranges that are being copied begin again after %s", self._name, waiters)
        self.is_lent = True
        self._end_copies()
        release(self._connection)

    def _end_copies(self) -> None:
        if self._gate is not None:
            self._gate.shut()
            end_copies(self._connection, self._gate.snapshot)

    def _shut_gate(self) -> None:
        if self._gate is not None:
            self._gate.shut()
