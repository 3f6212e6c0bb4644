"""A thread that writes samples and the progress of receiver and applier to the state database, and one that
keeps the app's lock.

The thread that supervises must not wait for a state database that does not answer.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime

from airflow_provider_pgrepl.errors import BusyError, PgReplError, SourceConnectionError
from airflow_provider_pgrepl.replication.app.status.summary import INTERVAL_S, SourceReading
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.host import BlockThread
from airflow_provider_pgrepl.replication.runtime.memory import resident_bytes
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import TableMerges
from airflow_provider_pgrepl.replication.state.samples import Sample, table_sample_interval_s
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_GRACE_S = 15.0
"""Seconds after a minute that a sample waits for the reading of the source, which may take a few seconds."""
_DELETE_INTERVAL_S = 600.0
_INTERVAL_S = 2.0
_LAST_S = 5.0
_LOCK_INTERVAL_S = 10.0


class SampleWriter:
    """Writes a sample with each reading of the source, which the summary makes once a minute.

    If there is no reading, because the source does not answer, a sample without the source's values is
    written. An error stops nothing: it is logged.
    """

    def __init__(
        self,
        state_db: StateDatabase,
        pipeline: str,
        received: Callable[[], ReceiverProgress],
        applied: Callable[[], ApplierProgress],
        source: Callable[[], SourceReading | None],
    ) -> None:
        self._state_db = state_db
        self._pipeline = pipeline
        self._received = received
        self._applied = applied
        self._source = source
        self._last = self._next_tables = self._next_delete = time.monotonic()
        self._changes, self._bytes = received().changes, received().bytes

    def write_if_due(self) -> None:
        """Write the samples that are due, and delete those that are too old."""
        reading, now = self._source(), time.monotonic()
        if reading is not None and reading.at <= self._last:
            reading = None
        if reading is None and now < self._last + INTERVAL_S + _GRACE_S:
            return
        try:
            self._state_db.write_sample(self._pipeline, self._sample(reading or SourceReading(now), now))
            if now >= self._next_tables:
                count = self._state_db.write_table_samples(self._pipeline, dict(self._applied().positions))
                self._next_tables = now + table_sample_interval_s(count)
            if now >= self._next_delete:
                self._next_delete = now + _DELETE_INTERVAL_S
                self._state_db.delete_old_samples(self._pipeline)
                self._state_db.delete_old_events(self._pipeline)
        except PgReplError as error:
            log.warning("no sample was recorded: %s", error.message)

    def _sample(self, source: SourceReading, now: float) -> Sample:
        received, applied, seconds = self._received(), self._applied(), max(now - self._last, 0.001)
        changes, size = received.changes - self._changes, received.bytes - self._bytes
        self._last, self._changes, self._bytes = now, received.changes, received.bytes
        return Sample(
            received_lsn=_known(received.received_lsn),
            durable_lsn=_known(received.durable_lsn),
            confirmed_lsn=_known(received.confirmed_lsn),
            applied_lsn=_known(applied.applied_lsn),
            wal_lsn=source.wal_lsn,
            lag_seconds=source.lag_seconds,
            lag_bytes=source.lag_bytes,
            # A new receiver, after a lost connection, may begin to count again.
            changes_per_s=max(0, changes) / seconds,
            bytes_per_s=max(0, size) / seconds,
            wal_retained_bytes=source.wal_retained_bytes,
            wal_limit_bytes=source.wal_limit_bytes,
            slot_active=source.slot_active,
            memory_bytes=resident_bytes(),
        )


def _known(lsn: LSN) -> LSN | None:
    return lsn or None


def holder() -> str:
    """Return the name of this process for people, as `host:pid`."""
    return f"{socket.gethostname()}:{os.getpid()}"


class ProgressWriter:
    """A thread that writes the progress every 2 s from `start` to `stop`, and once at the end.

    `error`: the error that ended the thread early. `idle_at` returns since when no batch is known to run, or
    None during maintenance, which also writes into the folders of tables. `complete_at` returns the time of
    the source up to which the lake is complete, None if it is not known.
    """

    def __init__(
        self,
        state_db: StateDatabase,
        pipeline: str,
        received: Callable[[], ReceiverProgress],
        applied: Callable[[], ApplierProgress],
        idle_at: Callable[[], datetime | None],
        samples: SampleWriter | None = None,
        complete_at: Callable[[], datetime | None] = lambda: None,
    ) -> None:
        self._state_db = state_db
        self._pipeline = pipeline
        self._received = received
        self._applied = applied
        self._idle_at = idle_at
        self._samples = samples
        self._complete_at = complete_at
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgrepl-progress", daemon=True)
        self._last_changes = 0
        self._last_time: float | None = None
        self.error: Exception | None = None

    def start(self) -> None:
        """Start writing."""
        self._thread.start()

    def stop(self) -> None:
        """Write for the last time, unless the state database does not answer."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)
        if self.error is None and not self._thread.is_alive():
            self._write()

    def _run(self) -> None:
        try:
            while not self._stopping.wait(_INTERVAL_S if self._last_time else 0):
                self._write()
                if self._samples is not None:
                    self._samples.write_if_due()
        except Exception as error:  # noqa: BLE001 - for the thread that supervises to raise
            log_unexpected(log, "writing the progress", error)
            self.error = error

    def _write(self) -> None:
        received, applied = self._received(), self._applied()
        rate = self._rate(received.changes)
        # The next write suffices. The threads that need the database report that it is away.
        with suppress(SourceConnectionError):
            self._state_db.write_progress(
                self._pipeline,
                received_lsn=received.received_lsn,
                durable_lsn=received.durable_lsn,
                confirmed_lsn=received.confirmed_lsn,
                applied_lsn=applied.applied_lsn,
                applied_commit_ts=applied.commit_ts,
                changes_per_s=rate,
                holder=holder(),
                idle_at=self._idle_at(),
                table_merges=_with_positions(applied),
                complete_at=self._complete_at(),
            )

    def _rate(self, changes: int) -> float:
        """Return the changes received per second since the last call."""
        now, last = time.monotonic(), self._last_time
        rate = 0.0 if last is None else (changes - self._last_changes) / max(now - last, 0.001)
        self._last_time, self._last_changes = now, changes
        return rate


def _with_positions(applied: ApplierProgress) -> dict[str, TableMerges] | None:
    if applied.merges is None:
        return None
    positions = dict(applied.positions)
    return {
        path: replace(merges, position=str(positions[path])) if path in positions else merges
        for path, merges in applied.merges.items()
    }


class LockKeeper(BlockThread):
    """A context manager that checks every few seconds that the session of `state_db` is alive.

    `state_db` is a reconnecting one. A restarted server has no session of this app: to other commands, such
    as teardown, the app would seem to have ended. `state_db` then connects and takes its locks again. While
    the database is away, nothing happens. If another process holds a lock by then, the keeper's thread calls
    `end`.
    """

    def __init__(
        self,
        state_db: StateDatabase,
        end: Callable[[], object],
        interval_s: float = _LOCK_INTERVAL_S,
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """:param report: called after each check, from the same thread; raises PgReplError"""
        super().__init__("pgrepl-lock")
        self._state_db = state_db
        self._end = end
        self._interval_s = interval_s
        self._report = report

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._state_db.now()
                self._report()
            except BusyError as error:
                if not self._stopping.is_set():
                    log.error("%s", error)
                    self._end()
                return
            except PgReplError as error:
                log.debug("the state database is away: %s", error.message)
