"""The common part of a run of the replication app with and without lake tables."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from airflow_provider_pgrepl.errors import FencedError, LakeError, PgReplError
from airflow_provider_pgrepl.replication.app.metrics.otlp import exports_metrics
from airflow_provider_pgrepl.replication.app.status.summary import SourceReading, SummaryLog
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance, VersionsForPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.receiver import ReconnectingReceiver
from airflow_provider_pgrepl.replication.runtime.metrics_endpoint import Address
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState

from . import process
from .evidence import stop_lost_copies
from .needed_changes import Retention, retention, retention_lsn
from .progress_writer import ProgressWriter, SampleWriter
from .source_problems import SourceProtection
from .tables import record_names

log = logging.getLogger(__name__)

POLL_S = 0.1
_RECEIVING_S = 3.0
"""Seconds that a query which ends on its own waits for the receiver. Each query starts Python processes, and
needs a second or two to find that there is nothing to apply."""
_BUDGET_INTERVAL_S = 15.0


class Replication:
    """One run of the app: a receiver, the work on its changelog, and the threads that watch both.

    A subclass does the work on the changelog.
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        stop: process.StopSignal,
    ) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._state_db = state_db
        self._stop = stop
        self._record = record
        self._receiver = ReconnectingReceiver(dsn, pipeline, follow_promotion=self._follow_promotion)
        self._applied = ApplierProgress()
        self._maintenance = Maintenance(pipeline, versions_for_points=self._versions_for_points)
        self._tidying = threading.Lock()
        self._next_maintenance = time.monotonic() + pipeline.maintenance_interval_s
        self._next_budget_check = time.monotonic() + _BUDGET_INTERVAL_S

    def run(self, target: LSN | None, metrics: Address | None = None) -> int:
        """Run until stopped or failed or, with a target, until everything up to it is in the lake.

        Returns the exit code.

        :param metrics: host and port of a Prometheus endpoint; None: there is none
        """
        is_measured = metrics is not None or exports_metrics()
        with self._serve_metrics(metrics) if is_measured else nullcontext():
            record_names(self._pipeline, self._state_db, self._record.epoch)
            self._receiver.start()
            try:
                return self._run_reported(target)
            finally:
                self._receiver.stop()

    def _serve_metrics(self, address: Address | None) -> AbstractContextManager[None]:
        # Import this here: it imports prometheus-client, which need not be installed.
        from airflow_provider_pgrepl.replication.app.metrics.replication import serve_replication

        return serve_replication(
            address,
            self._dsn,
            process.state_dsn(),
            self._pipeline,
            lambda: self._receiver.progress,
            lambda: self._applied,
            self._receiver.request_keepalive,
        )

    def _run_reported(self, target: LSN | None) -> int:
        """Do the work while progress is reported: from before the work begins, which may take seconds."""
        summary = self._make_summary()
        protection = SourceProtection(self._dsn, process.state_dsn(), self._pipeline)
        self._progress = self._make_progress_writer(lambda: summary.source)
        self._progress.start()
        summary.start()
        protection.start()
        try:
            code = self._work(target)
            if target is not None:
                summary.leave()
            return code
        finally:
            protection.stop()
            summary.stop()
            self._progress.stop()

    def _follow_promotion(self, fork_lsn: LSN) -> None:
        stop_lost_copies(self._pipeline, self._state_db, self._record, fork_lsn)

    def _work(self, target: LSN | None) -> int:
        """Work until it is time to end, or until everything up to a target is done.

        Returns the exit code. Raises the error that ended the work.
        """
        raise NotImplementedError

    def _needed_above(self) -> LSN | None:
        """Return the LSN above which this run needs changes, or None while it is not known."""
        raise NotImplementedError

    def _versions_for_points(self) -> VersionsForPoints:
        """Return the table versions that this run may name in later consistent points."""
        return {}

    def _done_version(self) -> int:
        """Return the newest changelog version that this run has finished with; below 0 if there is none."""
        raise NotImplementedError

    def _make_progress_writer(self, source: Callable[[], SourceReading | None]) -> ProgressWriter:
        return ProgressWriter(
            self._state_db,
            self._pipeline.name,
            lambda: self._receiver.progress,
            lambda: self._applied,
            lambda: None if self._tidying.locked() else self._applied.idle_at,
            SampleWriter(
                self._state_db,
                self._pipeline.name,
                lambda: self._receiver.progress,
                lambda: self._applied,
                source,
            ),
            lambda: None if (reading := source()) is None else reading.complete_at,
        )

    def _make_summary(self) -> SummaryLog:
        return SummaryLog(
            self._dsn,
            process.state_dsn(),
            self._pipeline,
            lambda: self._receiver.progress,
            lambda: self._applied,
            self._receiver.request_keepalive,
        )

    def _has_received(self, target: LSN) -> bool:
        """Return True once everything up to the target is durable; wait a few seconds for it.

        Returns False if the receiver takes longer: the changes that it has received are applied in the
        meantime. Also returns False if the receiver failed or it is time to end.
        """
        deadline = time.monotonic() + _RECEIVING_S
        while self._receiver.progress.seen_lsn < target:
            if self._receiver.failed.is_set() or time.monotonic() >= deadline or self._stop.wait(POLL_S / 2):
                return False
            self._receiver.request_keepalive()
        return True

    def _caught_up(self, target: LSN) -> int:
        failed = self._in_state(TableState.ERRORED)
        if failed:
            log.error(
                "up to %s, but without %s, which are errored: see pgrepl status", target, ", ".join(failed)
            )
            return process.WILL_NOT_HELP
        where = "lake" if self._pipeline.has_lake_tables else "changelog"
        log.info("everything up to %s is in the %s", target, where)
        return process.DONE

    def _in_state(self, state: TableState) -> list[str]:
        tables = self._state_db.read_tables(self._pipeline.name).values()
        return [str(table.table) for table in tables if table.state is state]

    def _supervise(self) -> None:
        """Raise the error that ended the receiver or the progress writer. Start maintenance if it is due."""
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
        if self._progress.error is not None:
            raise self._progress.error
        now = time.monotonic()
        if now >= self._next_maintenance:
            self._next_maintenance = now + self._pipeline.maintenance_interval_s
            self._begin_maintenance(self._maintain)
        elif now >= self._next_budget_check:
            self._begin_maintenance(self._keep_budget)

    def _begin_maintenance(self, work: Callable[[], None]) -> None:
        self._next_budget_check = time.monotonic() + _BUDGET_INTERVAL_S
        threading.Thread(target=self._alone, args=(work,), name="pgrepl-maintenance", daemon=True).start()

    def _alone(self, work: Callable[[], None]) -> None:
        """Run maintenance concurrently with the writers, unless other maintenance is running.

        An error is logged and stops nothing; the next run tries again.
        """
        if not self._tidying.acquire(blocking=False):
            return
        try:
            work()
            self._state_db.write_progress(self._pipeline.name, table_bytes=self._maintenance.measure())
        except PgReplError as error:
            log.warning("maintenance failed: %s", error)
        finally:
            self._tidying.release()

    def _keep_budget(self) -> None:
        for place, error in self._maintenance.keep_budget().failed.items():
            log.warning("the budget of %s cannot be kept: %s", place, error)

    def _maintain(self) -> None:
        needed = retention_lsn(self._dsn, self._pipeline, self._needed_above())
        version = self._done_version()
        kept = None if needed is None else self._retention(needed)
        done = self._maintenance.run(
            needed_above=None if kept is None else kept.needed_above,
            needed_later=() if kept is None else kept.needed_later,
            reader_version=version if version >= 0 else None,
        )
        for place, error in done.failed.items():
            log.warning("maintenance of %s failed: %s", place, error)

    def _retention(self, needed: LSN) -> Retention | None:
        """Return the retention; None, so that nothing is deleted, while the publishers' needs cannot be
        read."""
        try:
            return retention(self._pipeline, self._record.epoch, needed)
        except LakeError as error:
            log.warning("no hours of the changelog are deleted now: %s", error)
            return None

    def _raise_receiver_error(self) -> None:
        error = self._receiver.error
        if isinstance(error, FencedError):
            # Another receiver has taken over: this process must not write to the lake any more.
            log.error("%s", error)
            process.end_at_once()
        assert error is not None
        raise error
