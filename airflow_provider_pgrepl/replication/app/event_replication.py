"""Replication without lake tables: the receiver, a watch of definitions, and perhaps a publisher's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.memory import IdleRelease
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.trace import log_unexpected

from . import process, publish
from .publish import DurableLsnLookup, has_published
from .replication import POLL_S, Replication
from .table_watch import TableWatch

log = logging.getLogger(__name__)

_ENDS_WITHIN_S = process.STOP_LIMIT_S / 2


class _Asked:
    """The request to end that the publisher gets in place of a StopSignal, which works in a main thread
    only."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ask(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    @property
    def is_set(self) -> bool:
        return self._event.is_set()


class PublisherThread:
    """A thread that publishes from `start` to `stop`. Target and salt come from the environment."""

    def __init__(self, pipeline: Pipeline, name: str, durable_with: DurableLsnLookup) -> None:
        self._pipeline, self._name, self._durable_with = pipeline, name, durable_with
        self._asked = _Asked()
        self._publisher: Publisher | None = None
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pgrepl-publisher", daemon=True)

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, unless `stop` was called."""
        if self._ended.is_set() and not self._asked.is_set:
            raise self._error or PgReplError(f"publisher {self._name} has ended by itself")

    def has_published(self, durable: LSN) -> bool:
        """Return True if the target has accepted or rejected everything that committed before `durable`."""
        return self._publisher is not None and has_published(self._publisher.record, durable)

    @property
    def settled(self) -> int:
        """Return the number of changes that the target has accepted or rejected, in this and earlier runs."""
        record = None if self._publisher is None else self._publisher.record
        return record.published + record.skipped if record else 0

    @property
    def stopped_tables(self) -> list[str]:
        """Return the tables that are not published any more, sorted."""
        record = None if self._publisher is None else self._publisher.record
        return sorted(one.table for one in record.stopped.values()) if record else []

    def stop(self) -> None:
        """Ask the thread to end between two batches, and wait for that, up to 50 s.

        Events that were not confirmed are sent again by the next run.
        """
        self._asked.ask()
        self._thread.join(_ENDS_WITHIN_S)

    def _run(self) -> None:
        try:
            publish.publish(
                self._pipeline, self._name, self._asked, durable_with=self._durable_with, begun=self._begun
            )
        except Exception as error:  # noqa: BLE001 - for the thread that supervises to raise
            if not isinstance(error, PgReplError):
                log_unexpected(log, f"publisher {self._name}", error)
            self._error = error
        finally:
            self._ended.set()

    def _begun(self, publisher: Publisher) -> None:
        self._publisher = publisher


class EventReplication(Replication):
    """One run of the app for a pipeline without lake tables.

    :param publisher: the name of the publisher that runs in this process
    :param meanwhile: called about every 0.1 s
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        stop: process.StopSignal,
        publisher: str | None,
        meanwhile: Callable[[], None],
    ) -> None:
        super().__init__(dsn, pipeline, state_db, record, stop)
        self._watch = TableWatch(pipeline, state_db, record, self._applied)
        self._publisher = (
            None if publisher is None else PublisherThread(pipeline, publisher, self._durable_with)
        )
        self._meanwhile = meanwhile
        self._idle_release = IdleRelease()

    def _work(self, target: LSN | None) -> int:
        if self._publisher is not None:
            self._publisher.start()
        try:
            return self._watch_until(target)
        finally:
            if self._publisher is not None:
                self._publisher.stop()
            self._watch.save()

    def _durable_with(self, lsn: LSN) -> LSN | None:
        progress = self._receiver.progress
        if progress.seen_lsn < lsn:
            self._receiver.request_keepalive()
            return None
        # Read after `seen_lsn`, so that it covers everything that was durable then.
        return progress.durable_lsn

    def _needed_above(self) -> LSN:
        return self._watch.needed_above()

    def _done_version(self) -> int:
        return self._applied.version

    def _watch_until(self, target: LSN | None) -> int:
        while True:
            received = target is not None and self._receiver.progress.seen_lsn >= target
            durable, version = self._receiver.progress.durable_lsn, self._receiver.progress.changelog_version
            self._watch.look(version)
            self._supervise()
            self._meanwhile()
            # The publisher may send for minutes what was received in seconds.
            sent = None if self._publisher is None else self._publisher.settled
            self._idle_release.look((self._receiver.progress.changes, sent))
            if self._publisher is not None:
                self._publisher.check()
            if target is not None and received and self._is_done(durable, version):
                return self._caught_up(target)
            if target is not None:
                self._receiver.request_keepalive()
            if self._stop.wait(POLL_S):
                break
        if target is None:
            log.info("stopped; the changelog is at %s", self._receiver.progress.durable_lsn)
            return process.DONE
        log.warning("stopped before %s was reached", target)
        return process.RETRY_MAY_HELP

    def _is_done(self, durable: LSN, version: int) -> bool:
        """Return True if all durable changes were checked and, if a publisher runs here, published."""
        has_looked = self._applied.version >= version
        return has_looked and (self._publisher is None or self._publisher.has_published(durable))

    def _caught_up(self, target: LSN) -> int:
        code = super()._caught_up(target)
        if self._publisher is not None:
            # The record lists all stopped tables only once the publisher has ended.
            self._publisher.stop()
        if self._publisher is not None and self._publisher.stopped_tables:
            log.error("not published: %s: see pgrepl status", ", ".join(self._publisher.stopped_tables))
            return process.WILL_NOT_HELP
        return code
