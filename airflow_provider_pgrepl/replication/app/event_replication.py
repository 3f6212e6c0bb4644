"""Replication without lake tables: the receiver, a watch of table definitions, and perhaps a publisher."""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.publisher_thread import PublisherThread
from airflow_provider_pgrepl.replication.app.replication import POLL_S, Replication
from airflow_provider_pgrepl.replication.app.table_watch import TableWatch
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.memory import IdleRelease
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase

log = logging.getLogger(__name__)


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
