"""Replication with lake tables: the receiver, and the applier, whose Spark tasks merge changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.apply.applier import Applier, warm_up
from airflow_provider_pgrepl.replication.lake.maintenance import VersionsForPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.executors import await_executors
from airflow_provider_pgrepl.replication.spark.session import LazySession, has_local_jvm, runs_on_cluster
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState

from . import process
from .replication import POLL_S, Replication
from .sequences import SequenceRecorder
from .spark_start import start_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_LAST_MERGES_S = 10.0
"""Seconds that the app waits for running merges before it ends. Merges that are not committed then are
repeated."""


def session_of(pipeline: Pipeline, stop: process.StopSignal) -> LazySession:
    """Return the session of a run. One whose JVM runs already is started at once: it takes seconds.

    Executors of a cluster are requested only when everything else is checked.
    """
    name = f"replicate {pipeline.name}"
    session = LazySession(lambda: start_spark(name, StartTurn(name, lambda: stop.is_set)))
    if has_local_jvm():
        session.begin()
    return session


class LakeReplication(Replication):
    """One run of the app for a pipeline with lake tables. `session`: its caller stops it."""

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        stop: process.StopSignal,
        session: LazySession,
    ) -> None:
        super().__init__(dsn, pipeline, state_db, record, stop)
        self._session = session

    def _work(self, target: LSN | None) -> int:
        spark = self._session.get()
        self._stop.install()
        if runs_on_cluster():
            if not await_executors(spark, self._pipeline.lake_root, self._gives_up):
                return process.DONE if target is None else process.RETRY_MAY_HELP
            warm_up(spark)
        return self._apply(spark, target)

    def _gives_up(self) -> bool:
        """Return True if it is time to end while executors are awaited.

        Raises the error that ended the receiver.
        """
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
        return self._stop.is_set

    def _apply(self, spark: SparkSession, target: LSN | None) -> int:
        self._applier = Applier(spark, self._pipeline, self._state_db, self._record, self._applied)
        recorder = SequenceRecorder(
            self._dsn, self._pipeline, self._state_db, self._record, lambda: self._applied.applied_lsn
        )
        recorder.start()
        try:
            return self._run_forever() if target is None else self._run_until(target)
        finally:
            self._applier.stop(_LAST_MERGES_S)
            recorder.stop()

    def _supervise(self) -> None:
        super()._supervise()
        self._receiver.record_past(self._applied.wanted_lsn)

    def _needed_above(self) -> LSN | None:
        return self._applier.needed_above()

    def _versions_for_points(self) -> VersionsForPoints:
        return self._applier.versions_for_points()

    def _done_version(self) -> int:
        return self._applier.progress.version

    def _run_forever(self) -> int:
        self._follow()
        log.info("stopped; %s", self._applier.progress.described())
        return process.DONE

    def _follow(self, *, available_now: bool = False) -> bool:
        """Apply changes, and supervise, until it is time to end, or with `available_now` until those in the
        changelog are applied. Then wait for running merges.

        Returns False if it was time to end before. Raises the error that ended the applier or the receiver.
        """
        self._applier.start(available_now=available_now)
        while self._applier.is_reading and self._applier.error is None and not self._stop.wait(POLL_S):
            self._supervise()
        has_read_all = not self._applier.is_reading
        if self._applier.error is None and not has_read_all:
            self._applier.stop()
        if self._applier.error is not None:
            raise self._applier.error
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
        return has_read_all

    def _run_until(self, target: LSN) -> int:
        log.info("replicating until %s", target)
        while not self._stop.is_set:
            received = self._has_received(target)
            # What the applier reports does not hold for batches that it has not begun.
            received &= self._follow(available_now=True)
            if received and self._applier.progress.caught_up and not self._in_state(TableState.CATCHING_UP):
                return self._caught_up(target)
            self._receiver.request_keepalive()
            self._stop.wait(POLL_S)
            self._supervise()
        log.warning("stopped before %s was reached", target)
        return process.RETRY_MAY_HELP
