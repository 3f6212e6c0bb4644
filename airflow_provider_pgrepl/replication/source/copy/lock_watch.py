"""A thread that releases the locks of a copy as soon as a session of the source waits for them.

While a session of the source waits for ACCESS EXCLUSIVE, every later statement on the table waits behind it.
The server's deadlock detector does not help: the copy's sessions wait for each other outside the server.
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
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors
from airflow_provider_pgrepl.trace import log_unexpected

from .imported_snapshot import WAITER_HINT, SnapshotExporter, lost

# pg_stat_activity is cached for the transaction unless it is cleared. Values hidden from the role are NULL.
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
# Replay of DDL waits for a lock like a session, but pg_blocking_pids does not include it. No session of a
# standby can request this mode. Queries of the table queue behind it. Replay can also wait for an index,
# because planning a query locks the indexes of the table.
_REPLAY = """(pg_catalog.pg_is_in_recovery() AND w.mode = 'AccessExclusiveLock' AND EXISTS (
        SELECT FROM pg_catalog.pg_locks held JOIN ours ON ours.pid = held.pid WHERE held.granted
            AND held.locktype = 'relation' AND held.database = w.database AND held.relation = w.relation))"""
_END_COPIES = "{refresh} SELECT pg_catalog.pg_terminate_backend(c.pid, {patience}) FROM ({copies}) AS c"
_ACT_AS = "SELECT current_user::text, pg_catalog.set_config('role', %s, true)"

_ENDING_MS = 2000

# At most two words: the rest of the statement may hold values.
_COMMAND = re.compile(r"\s*([A-Za-z]+(?:\s+[A-Za-z]+)?)")
log = logging.getLogger(__name__)
POLL_S = 0.25
"""The seconds between two checks. A statement of the source waits for one check, and the end of the copy."""


@dataclass(frozen=True)
class LockWaiter:
    """A session that waits for a lock. `command`: the first words of its statement, if the role may see it.

    `ends_copy`: the session waits for the end of the snapshot or of the ACCESS SHARE lock, which every copy
    needs. Otherwise it waits for the lock against code of the table's owner.
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
    """Return the role of the sessions that copy under a snapshot. Only one table's gate has this snapshot."""
    return f"copy {snapshot}"


def read_waiters(connection: Connection, pids: Iterable[int] = (), snapshot: str = "") -> list[LockWaiter]:
    """Return the sessions that wait for this one, for `pids`, or for a copy under `snapshot`.

    These are waits for locks on relations and for the end of a transaction, as by CREATE INDEX CONCURRENTLY.
    On a standby, replay that waits for a relation that one of the sessions has locked counts as well.
    """
    with source_errors("looking for sessions that wait for the copy"):
        found = rows(connection, _filled(_WAITERS), {"pids": list(pids), **_copies(snapshot)})
    return [
        LockWaiter(pid, role or "unknown", application or "", mode, _command(query or ""), ends_copy)
        for pid, role, application, mode, query, ends_copy in found
    ]


def end_copies(connection: Connection, snapshot: str) -> None:
    """End the sessions that copy under a snapshot, and wait up to 2 s for the end of each.

    A cancel would not reach a session whose client reads nothing.
    """
    with source_errors("ending the copies of a table"):
        # A session belongs to its login role. If this session acts as another role, that may not end it.
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
    """A watch over a session that holds a snapshot, and locks, in a transaction of `connection`.

    `failure`: the error that ended the watch early. `name` and `kind`: the name in that error, and its class.
    `gate`: the session that exports the snapshot to copies. It ends first, so that no more copies can begin.
    `release`: releases the lock that not every copy needs. This lock is lent to a statement that waits only
    for it: running copies are ended, and others can begin after `resume`.
    """

    def __init__(
        self,
        connection: Connection,
        name: str,
        kind: type[SnapshotError] = SnapshotError,
        gate: SnapshotExporter | None = None,
        release: Callable[[Connection], None] | None = None,
    ) -> None:
        self.failure: PgReplError | None = None
        self.is_lent = False
        self.turn = threading.Lock()
        """Held by the thread that uses the connection. The connection's transaction may have failed."""
        self._release = release
        self._connection = connection
        self._name = name
        self._kind = kind
        self._gate = gate
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"lock watch {name}", daemon=True)

    def start(self) -> None:
        """Start watching, until `close`, or until the session has released its locks for a waiting one."""
        self._thread.start()

    def check(self) -> None:
        """Raise an error of class `kind` if the session has released its locks, or was lost."""
        self.raise_failure()
        try:
            with self.turn:
                row(self._connection, "SELECT 1")
        except psycopg2.Error as error:
            # The watch may have set `failure` since it was checked.
            raise self.failure or lost(describe(error), self._kind) from None

    def raise_failure(self) -> None:
        """Raise `failure` if it is set."""
        if self.failure is not None:
            raise self.failure

    def resume(self, gate: SnapshotExporter) -> None:
        """Let copies begin again, at another gate. Called with `turn` held, and the lent lock taken back."""
        self._gate, self.is_lent = gate, False

    def close(self) -> None:
        """Stop watching and end the session. Can be called again."""
        self._stop.set()
        if self._thread.ident is not None:
            # Wait before closing the connection: the thread may be using it.
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
        except Exception as error:  # noqa: BLE001 - after any error, the locks are unwatched
            if not self._stop.is_set():
                log_unexpected(log, f"watching the locks of {self._name}", error)
            self._give_up(type(error).__name__)

    def _give_up(self, reason: str) -> None:
        """Set `failure` and end the session: it must not hold locks without a watch."""
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
            WAITER_HINT,
        )
        log.warning("%s", self.failure.message)
        self._end_copies()
        # Keep the connection open for the thread that uses it. What that thread reads is not used any more.
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
