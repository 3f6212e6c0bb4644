"""A thread that gives way as soon as a session of the source waits for the copy."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

import psycopg2

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError
from airflow_provider_pgrepl.replication.source.connection import Connection, row
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import Gate, lost
from airflow_provider_pgrepl.replication.source.copy.lock_waiters import LockWaiter, end_copies, read_waiters
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors
from airflow_provider_pgrepl.replication.source.time_limit import ANSWER_LIMIT_S
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

POLL_S = 0.25
"""How long a statement of the source waits for the copy at most, and the time that ending the copy takes."""


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
