"""Replication with lake tables: the receiver, and the applier, whose Spark tasks merge changes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.replication import POLL_S, Replication
from airflow_provider_pgrepl.replication.lake.apply.applier import Applier
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.spark.executors import await_executors
from airflow_provider_pgrepl.replication.spark.failures import is_of_workers, spark_error, text_of
from airflow_provider_pgrepl.replication.spark.session import build_session, runs_on_cluster
from airflow_provider_pgrepl.replication.state.tables import TableState

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_STARTS = 3
"""Starts of a query in a row: Spark waits 10 s for the Python process of its source, which may take longer to
load on a busy host."""
_LAST_MERGES_S = 10.0
"""Seconds that the app waits for running merges before it ends. Merges that are not committed then are
repeated."""


class LakeReplication(Replication):
    """One run of the app for a pipeline with lake tables."""

    def _work(self, target: LSN | None) -> int:
        spark = None
        try:
            name = f"pgrepl replicate {self._pipeline.name}"
            spark = build_session(name, delta=False, spare_slot=True)
            self._stop.install()
            if runs_on_cluster() and not await_executors(spark, self._pipeline.lake_root, self._gives_up):
                return process.DONE if target is None else process.RETRY_MAY_HELP
            return self._apply(spark, target)
        finally:
            if spark is not None:
                spark.stop()

    def _gives_up(self) -> bool:
        """Return True if it is time to end while executors are awaited.

        Raises the error that ended the receiver.
        """
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
        return self._stop.is_set

    def _apply(self, spark: SparkSession, target: LSN | None) -> int:
        self._applier = Applier(spark, self._pipeline, self._store, self._record, self._applied)
        try:
            return self._run_forever() if target is None else self._run_until(target)
        finally:
            self._applier.close(_LAST_MERGES_S)

    def _needed_above(self) -> LSN | None:
        return self._applier.needed_above()

    def _done_version(self) -> int:
        return self._applier.progress.version

    def _run_forever(self) -> int:
        self._follow()
        log.info("stopped; %s", self._applier.progress.described())
        return process.DONE

    def _follow(self, *, available_now: bool = False) -> None:
        """Run a query to its end. Start another one if Spark could not start its Python process in time."""
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
        """Supervise until the query ends, the applier fails, or it is time to end."""
        while query.isActive and self._applier.error is None and not self._stop.wait(POLL_S):
            self._supervise()

    def _run_until(self, target: LSN) -> int:
        log.info("replicating until %s", target)
        while not self._stop.is_set:
            received = self._has_received(target)
            self._follow(available_now=True)
            if received and self._applier.progress.caught_up and not self._in_state(TableState.CATCHING_UP):
                return self._caught_up(target)
            self._receiver.request_keepalive()
            self._stop.wait(POLL_S)
            self._supervise()
        log.warning("stopped before %s was reached", target)
        return process.RETRY_MAY_HELP

    def _finish(self, query: StreamingQuery) -> None:
        """Stop a running query after its batch.

        Raises the error that ended the query, the applier or the receiver.
        """
        if query.isActive:
            self._applier.stop(query)
        elif (failure := query.exception()) is not None and self._applier.error is None:
            raise spark_error("the streaming query failed", text_of(failure))
        if self._applier.error is not None:
            raise self._applier.error
        if self._receiver.failed.is_set():
            self._raise_receiver_error()
