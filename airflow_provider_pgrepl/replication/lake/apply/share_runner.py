"""ShareRunner: has Spark run shares of merges, each as a job of one task, several beside each other."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.lake.apply.merge_task import Share, run_share
from airflow_provider_pgrepl.replication.lake.apply.table_result import TableResult
from airflow_provider_pgrepl.replication.spark.executors import on_executor, result_of, slots_of
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.trace import log_unexpected

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_MOST = 256
"""Shares at once; a thread is made when one is wanted, and waits for its share."""

Done = Callable[[Share, list[TableResult], Exception | None], None]


class ShareRunner:
    """`done` is called, in a thread of its own, with each share, the results of its first jobs, and what has
    failed if Spark did."""

    def __init__(self, spark: SparkSession, done: Done) -> None:
        self._context = spark.sparkContext
        self._done = done
        self._threads = ThreadPoolExecutor(_MOST, thread_name_prefix="pgrepl-merge")

    @property
    def slots(self) -> int:
        """How many shares Spark runs at once: on a cluster executors come and go. Raises SparkError.

        One task more is left for the streaming query: however long merges take, it has to hear what has come.
        """
        with spark_errors("counting executors"):
            return min(_MOST, max(1, slots_of(self._context) - 1))

    def run(self, share: Share) -> None:
        """Returns at once."""
        self._threads.submit(self._run, share)

    def close(self) -> None:
        """Wait for the threads, whose shares have ended."""
        self._threads.shutdown()

    def _run(self, share: Share) -> None:
        results: list[TableResult] = []
        failed: Exception | None = None
        try:
            with spark_errors("applying changes"):
                task = on_executor(run_share)
                frames = self._context.parallelize([list(share)], 1).map(task).collect()
            results = result_of(frames[0])
        except Exception as error:  # noqa: BLE001 - whoever waits for the share raises it
            log_unexpected(log, "applying changes", error)
            failed = error
        try:
            self._done(share, results, failed)
        except Exception as error:
            # The pool keeps it, and nobody asks the pool.
            log_unexpected(log, "taking the results of a share", error)
            raise
