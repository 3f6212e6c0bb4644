"""ShareRunner: has Spark run shares of merges, each as a job of one task, several beside each other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.lake.applying.merge_job import Share, run_share
from airflow_provider_pgrepl.replication.lake.applying.table_result import TableResult
from airflow_provider_pgrepl.replication.lake.spark_failures import spark_errors
from airflow_provider_pgrepl.replication.store_variables import reaching_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Done = Callable[[Share, list[TableResult], Exception | None], None]


class ShareRunner:
    """`slots`: how many tasks Spark runs at once. `done` is called, in a thread of its own, with each share,
    the results of its first jobs, and what has failed if Spark did."""

    def __init__(self, spark: SparkSession, done: Done) -> None:
        self._context = spark.sparkContext
        self._done = done
        # One is for the streaming query: however long merges take, it has to hear what has come.
        self.slots = max(1, self._context.defaultParallelism - 1)
        self._threads = ThreadPoolExecutor(self.slots, thread_name_prefix="pgrepl-merge")

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
                task = reaching_store(run_share)
                frames = self._context.parallelize([list(share)], 1).map(task).collect()
            results = frames[0]
        except Exception as error:  # noqa: BLE001 - whoever waits for the share raises it
            failed = error
        self._done(share, results, failed)
