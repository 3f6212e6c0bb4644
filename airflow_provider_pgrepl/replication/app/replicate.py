"""The replication app: receiver and applier in one process, until it is stopped or has caught up."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import (
    ConfigError,
    FencedError,
    LakeError,
    PgReplError,
)
from airflow_provider_pgrepl.replication.app import process, progress_writer
from airflow_provider_pgrepl.replication.app.app_arguments import of_replicate
from airflow_provider_pgrepl.replication.app.drift_check.source_protection import SourceProtection
from airflow_provider_pgrepl.replication.app.evidence import check, record_evidence
from airflow_provider_pgrepl.replication.app.known_relations import recall_relations
from airflow_provider_pgrepl.replication.app.lost_lake import begun_epoch, known_tables
from airflow_provider_pgrepl.replication.app.lost_state import check_state
from airflow_provider_pgrepl.replication.app.needed_changes import Retention, needed_above, retention
from airflow_provider_pgrepl.replication.app.progress_writer import ProgressWriter
from airflow_provider_pgrepl.replication.app.reconnecting_store import open_reconnecting_store
from airflow_provider_pgrepl.replication.app.requested_tables import file_differences
from airflow_provider_pgrepl.replication.app.status.summary import SummaryLog
from airflow_provider_pgrepl.replication.app.torn_commits import settle_lake
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.compiled import begin_compiling
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.applying.applier import Applier
from airflow_provider_pgrepl.replication.lake.applying.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.lake.executors import await_executors
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.lake.session import build_session, runs_on_cluster
from airflow_provider_pgrepl.replication.lake.spark_failures import is_of_workers, spark_error, text_of
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.receiving.reconnecting import ReconnectingReceiver
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.preflight.check import check_role
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.storage.store_probe import check_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_POLL_S = 0.1
_RECEIVING_S = 3.0
"""How long a query that ends by itself waits for the receiver: each starts Python processes of its own, and
takes a second or two to find that nothing has come."""
_STARTS = 3
"""How often in a row a query is started: Spark waits 10 s for the Python process of its source, which may
take longer to load on a busy host."""
_BUDGET_INTERVAL_S = 15.0
_LAST_MERGES_S = 10.0
"""For merges that still run when something has failed; what is not committed then is done again."""


def main(argv: Sequence[str]) -> int:
    """Run the app; returns its exit code."""
    return process.run("replicate", argv, of_replicate, _run)


def _run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    begin_compiling()
    dsn = process.source_dsn()
    role = f"replicate {pipeline.name}"
    with (
        process.StopSignal() as stop,
        closing(open_reconnecting_store(process.state_dsn(), role, pipeline.reconnect_s, stop.wait)) as store,
    ):
        store.lock(pipeline.name, "replicate")
        check_store(pipeline.lake_root)
        # Before anything in it is set aside, and again with what may not have been readable before that.
        settle_lake(check(pipeline, store, dsn, lake_may_fail=True), dsn)
        evidence = check(pipeline, store, dsn)
        record = begun_epoch(store, pipeline)
        check_record(pipeline, record)
        check_state(store, pipeline, record)
        store.migrate()
        own_tables.check(pipeline.lake_root, known_tables(store, record))
        record_evidence(store, evidence)
        own_tables.record(pipeline.lake_root)
        records = store.read_tables(pipeline.name)
        for difference in file_differences(pipeline, records):
            log.warning("%s", difference)
        recall_relations(pipeline, record, records.values())
        # Spark takes its time to start: whoever looks meanwhile is not to see the process before this one.
        store.write_progress(pipeline.name, holder=progress_writer.holder())
        check_role(dsn, pipeline)
        target = _target(dsn, arguments.until)
        return Replication(dsn, pipeline, store, record, stop).run(target)


def check_record(pipeline: Pipeline, record: EpochRecord) -> None:
    """Raises ConfigError for a lake that was begun with another slot or publication."""
    for field in ("slot", "publication"):
        begun, wanted = getattr(record, field), getattr(pipeline, field)
        if begun != wanted:
            raise ConfigError(
                f"{field}: this lake was begun with {begun!r}, not {wanted!r}",
                f"set it back, or {hints.NEW_EPOCH}",
            )


def _target(dsn: str, until: LSN | str | None) -> LSN | None:
    if until is None or isinstance(until, LSN):
        return until
    with closing(connect(dsn, "catch-up target")) as connection:
        return wal_lsn(connection)


class Replication:
    """One run of the app."""

    def __init__(
        self, dsn: str, pipeline: Pipeline, store: Store, record: EpochRecord, stop: process.StopSignal
    ) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._store = store
        self._stop = stop
        self._receiver = ReconnectingReceiver(dsn, pipeline)
        self._record = record
        self._applied = ApplierProgress()
        self._maintenance = Maintenance(pipeline)
        self._tidying = threading.Lock()
        self._next_maintenance = time.monotonic() + pipeline.maintenance_interval_s
        self._next_budget_check = time.monotonic() + _BUDGET_INTERVAL_S

    def run(self, target: LSN | None) -> int:
        """Until stopped, failed, or (with a target) everything up to it is in the lake."""
        self._receiver.start()
        try:
            return self._run_reported(target)
        finally:
            self._receiver.stop()

    def _run_reported(self, target: LSN | None) -> int:
        """What is received is reported also while Spark's session is made, which takes some seconds."""
        summary, spark = self._make_summary(), None
        protection = SourceProtection(self._dsn, process.state_dsn(), self._pipeline)
        self._progress = self._make_progress_writer()
        self._progress.start()
        summary.start()
        protection.start()
        try:
            name = f"pgrepl replicate {self._pipeline.name}"
            spark = build_session(name, delta=False, spare_slot=True)
            self._stop.install()
            if runs_on_cluster() and not await_executors(spark, self._pipeline.lake_root, self._gives_up):
                return process.DONE if target is None else process.RETRY_MAY_HELP
            code = self._apply(spark, target)
            if target is not None:
                summary.leave()
            return code
        finally:
            protection.stop()
            summary.stop()
            self._progress.stop()
            if spark is not None:
                spark.stop()

    def _gives_up(self) -> bool:
        """Whether to end is asked for while executors are waited for. Raises what ended the receiver."""
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
        return self._stop.is_set

    def _apply(self, spark: SparkSession, target: LSN | None) -> int:
        self._applier = Applier(spark, self._pipeline, self._store, self._record, self._applied)
        try:
            return self._run_forever() if target is None else self._run_until(target)
        finally:
            self._applier.close(_LAST_MERGES_S)

    def _make_progress_writer(self) -> ProgressWriter:
        return ProgressWriter(
            self._store,
            self._pipeline.name,
            lambda: self._receiver.progress,
            lambda: self._applied,
            lambda: None if self._tidying.locked() else self._applied.idle_at,
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

    def _run_forever(self) -> int:
        self._follow()
        log.info("stopped; the lake is at %s", self._applier.progress.applied_lsn)
        return process.DONE

    def _follow(self, *, available_now: bool = False) -> None:
        """Run a query to its end; start another one when Spark could not start its Python process in time."""
        for left in reversed(range(_STARTS)):
            query = self._applier.start(available_now=available_now)
            self._watch(query)
            if not left or not self._lacked_workers(query):
                break
            log.warning(
                "Spark could not start the Python process of its streaming query: starting the query again"
            )
        self._finish(query)

    def _lacked_workers(self, query: StreamingQuery) -> bool:
        failure = None if query.isActive else query.exception()
        return failure is not None and self._applier.error is None and is_of_workers(str(failure))

    def _watch(self, query: StreamingQuery) -> None:
        """Until the query ends, the applier fails, or we are to stop."""
        while query.isActive and self._applier.error is None and not self._stop.wait(_POLL_S):
            self._supervise()

    def _run_until(self, target: LSN) -> int:
        log.info("replicating until %s", target)
        while not self._stop.is_set:
            received = self._has_received(target)
            self._follow(available_now=True)
            if received and self._applier.progress.caught_up and not self._in_state(TableState.CATCHING_UP):
                return self._caught_up(target)
            self._receiver.request_keepalive()
            self._stop.wait(_POLL_S)
            self._supervise()
        log.warning("stopped before %s was reached", target)
        return process.RETRY_MAY_HELP

    def _has_received(self, target: LSN) -> bool:
        """Return True once everything up to the target is durable; wait a few seconds for it.

        A receiver that takes longer is not waited for: what it has received is applied meanwhile.
        """
        deadline = time.monotonic() + _RECEIVING_S
        while self._receiver.progress.seen_lsn < target:
            if self._receiver.failed.is_set() or time.monotonic() >= deadline or self._stop.wait(_POLL_S / 2):
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
        log.info("everything up to %s is in the lake", target)
        return process.DONE

    def _in_state(self, state: TableState) -> list[str]:
        tables = self._store.read_tables(self._pipeline.name).values()
        return [str(table.table) for table in tables if table.state is state]

    def _supervise(self) -> None:
        """Raise what ended the receiver; report; look after the lake when it is time."""
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
        """Runs beside the writers. What fails here is tried again next time, and stops nothing."""
        if not self._tidying.acquire(blocking=False):
            return
        try:
            work()
            self._store.write_progress(self._pipeline.name, table_bytes=self._maintenance.measure())
        except PgReplError as error:
            log.warning("maintenance failed: %s", error)
        finally:
            self._tidying.release()

    def _keep_budget(self) -> None:
        for place, error in self._maintenance.keep_budget().failed.items():
            log.warning("the budget of %s cannot be kept: %s", place, error)

    def _maintain(self) -> None:
        needed = needed_above(self._dsn, self._pipeline, self._applier.needed_above())
        version = self._applier.progress.version
        kept = None if needed is None else self._retention(needed)
        done = self._maintenance.run(
            needed_above=None if kept is None else kept.needed_above,
            needed_later=() if kept is None else kept.needed_later,
            reader_version=version if version >= 0 else None,
        )
        for place, error in done.failed.items():
            log.warning("maintenance of %s failed: %s", place, error)

    def _retention(self, needed: LSN) -> Retention | None:
        """None, so that nothing goes, while it cannot be read what publishers need."""
        try:
            return retention(self._pipeline, self._record.epoch, needed)
        except LakeError as error:
            log.warning("the changelog keeps its old hours for now: %s", error)
            return None

    def _raise_receiver_error(self) -> None:
        error = self._receiver.error
        if isinstance(error, FencedError):
            # Another process is at work: nothing of ours may touch the lake from here on.
            log.error("%s", error)
            process.end_at_once()
        assert error is not None
        raise error

    def _finish(self, query: StreamingQuery) -> None:
        """Wait for the batch that runs; raise what ended the query, if not we."""
        if query.isActive:
            self._applier.stop(query)
        elif (failure := query.exception()) is not None and self._applier.error is None:
            raise spark_error("the streaming query", text_of(failure))
        if self._applier.error is not None:
            raise self._applier.error
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
