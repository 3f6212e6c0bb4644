"""The applier: changelog commits into lake tables, each at its own pace, and consistent points of them all.

A table's position in the lake is the truth; what the applier remembers only saves looking. A table it does
not know to have caught up (after a start, a snapshot, an error mended) is brought forward from the
changelog's live files, while the others go on.

Spark's streaming query tells what has come. A thread of the applier's own gives it out: no table waits for
the merge of another, nor does the query.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.lake.apply.changelog_source import FORMAT, ChangelogSource
from airflow_provider_pgrepl.replication.lake.apply.scheduler import MergeRounds
from airflow_provider_pgrepl.replication.lake.apply.work_item import MARK, ApplierProgress, BatchEnd, WorkItem
from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.runtime.compiled_loops import ensure_compiled
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.failures import spark_errors
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.trace import log_unexpected

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)
_READING_S = 10.0


def warm_up(spark: SparkSession) -> None:
    """Have each Python worker that merges may use merge a row; one slot is the streaming query's own.

    The loops are compiled first, so that Spark's daemon of workers finds them.
    """
    ensure_compiled()
    tasks = max(1, spark.sparkContext.defaultParallelism - 1)
    spark.sparkContext.parallelize(range(tasks), tasks).foreach(lambda _number: merge_a_row())


def merge_a_row() -> None:
    """Load in this process what merging needs."""
    relation = Relation(
        0, TableName("none", "none"), (Column("key", 1, oids.INT4, -1, "integer", is_key=True),)
    )
    change = {"commit_lsn": 1, "ordinal": 0, "relation_id": 0, "op": "I", "new": ["1"]}
    collapse(pa.Table.from_pylist([change], schema=ROW_SCHEMA), relation)


class Applier:
    """Runs the streaming query, and the merges. `error` holds what ended them, when something did."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        store: Store,
        record: EpochRecord,
        progress: ApplierProgress | None = None,
    ) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._record = record
        self._uri = changelog_uri(pipeline.lake_root)
        self.progress = progress or ApplierProgress()
        self.error: Exception | None = None
        self._changed = threading.Condition(threading.RLock())
        self._rounds = MergeRounds(spark, pipeline, store, record, self.progress, self._changed)
        self._is_warm = self._stopping = self._until_settled = False
        self._holders = 0
        self._reading = threading.Lock()
        self._thread: threading.Thread | None = None
        self._query: StreamingQuery | None = None
        # Tables say themselves where they are: what Spark writes down of its query is for this run alone, and
        # only its driver reads and writes it.
        self._scratch = TemporaryDirectory(prefix="pgrepl-checkpoint-", ignore_cleanup_errors=True)
        spark.dataSource.register(ChangelogSource)

    def start(self, *, available_now: bool = False) -> StreamingQuery:
        """Begin to apply: for good, or what the changelog holds now. Raises SparkError."""
        with spark_errors("starting the streaming query"):
            return self._start(available_now=available_now)

    def _start(self, *, available_now: bool) -> StreamingQuery:
        if not self._is_warm:
            warm_up(self._spark)
            self._is_warm = True
        self._until_settled = available_now
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pgrepl-applier", daemon=True)
            self._thread.start()
        frame = (
            self._spark.readStream.format(FORMAT)
            .option("uri", self._uri)
            .option("batch_bytes", str(self._pipeline.batch_bytes))
            .load()
        )
        checkpoint = Path(self._scratch.name).as_uri()
        stream = frame.writeStream.option("checkpointLocation", checkpoint).foreachBatch(self._on_batch)
        if available_now:
            stream = stream.trigger(availableNow=True)
        else:
            stream = stream.trigger(processingTime=f"{self._pipeline.trigger_interval_s} seconds")
        self._query = stream.start()
        return self._query

    def needed_above(self) -> LSN | None:
        """The lowest position above which a table has a right to changes; None while one is copied.

        0 when the position of one cannot be read: it may need all there is.
        """
        return self._rounds.needed_above()

    def stop(self, query: StreamingQuery) -> None:
        """End between two merges; those that run are finished first."""
        self.end()
        # Spark would break off what reads a batch just now, and call that a failure; no other begins.
        if self._reading.acquire(timeout=_READING_S):
            self._reading.release()
        query.stop()

    def close(self, timeout_s: float) -> None:
        """Whatever has failed: end, and leave no query behind that would go on asking."""
        self.end(timeout_s)
        if self._query is not None:
            try:
                self._query.stop()
            except Exception as error:  # noqa: BLE001 - what has failed before is what counts
                log_unexpected(log, "stopping the streaming query", error, logging.WARNING)
        self._scratch.cleanup()

    def end(self, timeout_s: float | None = None) -> None:
        """Begin no merge any more, and wait so long for those that run."""
        self._stopping = True
        if self._changed.acquire(timeout=-1 if timeout_s is None else timeout_s):
            self._changed.notify_all()
            self._changed.release()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Within, no merge runs, and none of what comes meanwhile begins."""
        with self._changed:
            self._holders += 1
            self._changed.wait_for(lambda: self.error is not None or not self._rounds.is_running)
        try:
            yield
        finally:
            with self._changed:
                self._holders -= 1
                self._changed.notify_all()

    def _on_batch(self, frame: DataFrame, _batch_id: int) -> None:
        try:
            with self._reading, spark_errors("reading a batch"):
                # One that comes after the end is left alone: tables say themselves what they lack.
                rows = [] if self._has_ended else frame.collect()
            if rows:
                self._add([WorkItem.from_json(row.work) for row in rows])
        except Exception as error:
            if not self._stopping:
                log_unexpected(log, "taking a batch", error)
                self.error = self.error or error
            if isinstance(error, errors.PgReplError):
                raise
            failed = type(error).__name__
        else:
            return
        # Spark logs what the query fails with: it gets no text that may hold values of rows.
        raise errors.SparkError(f"taking a batch failed with {failed}")

    def _add(self, items: list[WorkItem]) -> None:
        mark = self._settle_mark(next(item for item in items if item.relation_id == MARK))
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or not self._holders)
            if self._has_ended:
                return
            changes = [item for item in items if item.relation_id != MARK]
            if mark.epoch < self._record.epoch:
                # What is left over from before this epoch is in its snapshot; its LSNs say nothing of ours.
                mark, changes = replace(mark, durable_lsn=1, last_commit_us=0), []
            self._rounds.add(BatchEnd.of(mark), mark.from_version, changes)
            self.progress.batches += 1
            self._changed.notify_all()
            if self._until_settled:
                self._changed.wait_for(lambda: self._has_ended or self._rounds.is_settled)

    @property
    def _has_ended(self) -> bool:
        return self._stopping or self.error is not None

    def _settle_mark(self, mark: WorkItem) -> WorkItem:
        """Check the epoch; ask the changelog itself where the batch's commits do not say."""
        if self.progress.batches == 0 or not mark.epoch:
            mark = mark.as_recorded(self._uri)
        if mark.epoch > self._record.epoch:
            raise errors.FencedError(
                f"epoch {mark.epoch} of the changelog began, this process applies epoch {self._record.epoch}"
            )
        return replace(mark, durable_lsn=max(mark.durable_lsn, self.progress.applied_lsn + 1))

    def _run(self) -> None:
        """What the thread does: gives out what has come, and takes what has ended."""
        with self._changed:
            try:
                while self.error is None and (not self._stopping or self._rounds.is_running):
                    may_begin = not (self._holders or self._stopping)
                    self._rounds.step(may_begin=may_begin, hurries=self._until_settled)
                    self._changed.notify_all()
                    if not self._rounds.has_news:
                        self._changed.wait(self._rounds.rest_s)
            except Exception as error:  # noqa: BLE001 - the thread that supervises raises it
                log_unexpected(log, "applying changes", error)
                self.error = self.error or error
            self._changed.notify_all()
        self._rounds.close()
