"""The applier: changelog commits into lake tables, batch by batch, one consistent point after each.

A table's position in the lake is the truth; what the applier remembers only saves looking. A table it does
not know to have caught up (after a start, a snapshot, an error mended) is brought forward from the
changelog's live files, whatever Spark's checkpoint says, while the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.applying.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.lake.applying.catch_up_planner import CatchUpPlanner, snapshot_of
from airflow_provider_pgrepl.replication.lake.applying.caught_up_tables import (
    CaughtUpTable,
    CaughtUpTables,
    versions_of,
)
from airflow_provider_pgrepl.replication.lake.applying.changelog_source import FORMAT, ChangelogSource
from airflow_provider_pgrepl.replication.lake.applying.checkpoint import checkpoint_uri, drop_checkpoint
from airflow_provider_pgrepl.replication.lake.applying.recorded_tables import RecordedTables
from airflow_provider_pgrepl.replication.lake.applying.table_work import TableResult, fingerprints_at
from airflow_provider_pgrepl.replication.lake.applying.tasks import (
    RESULT,
    CatchUp,
    apply_items,
    read_results,
    warm_up,
)
from airflow_provider_pgrepl.replication.lake.applying.work_item import WorkItem
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.spark_failures import spark_errors
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.state.store import Store, TableRecord
from airflow_provider_pgrepl.replication.state.table_state import TableState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 30.0
"""How often tables without changes are looked at: whether they still are as they were left."""
_ACTIVE = (TableState.CATCHING_UP, TableState.STREAMING)


class Applier:
    """Runs the streaming query. `error` holds what ended it, when something did."""

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
        self._store = store
        self._record = record
        self._uri = changelog_uri(pipeline.lake_root)
        self._points = Points(pipeline.lake_root)
        self._tables = RecordedTables(pipeline, record, self._points)
        self._caught_up = CaughtUpTables()
        self._planner = CatchUpPlanner(pipeline, record, self._tables)
        self._stopping = False
        self._is_warm = False
        self.batch_lock = threading.Lock()
        """Held while a batch runs: whoever holds it knows that nothing is being applied."""
        self.progress = progress or ApplierProgress()
        self.error: Exception | None = None
        spark.dataSource.register(ChangelogSource)

    def start(self, *, available_now: bool = False) -> StreamingQuery:
        """Begin to apply: for good, or what the changelog holds now. Raises SparkError."""
        with spark_errors("starting the streaming query"):
            return self._start(available_now=available_now)

    def _start(self, *, available_now: bool) -> StreamingQuery:
        tasks = max(1, self._spark.sparkContext.defaultParallelism)
        if not self._is_warm:
            drop_checkpoint(self._pipeline.lake_root)
            warm_up(self._spark, tasks)
            self._is_warm = True
        frame = (
            self._spark.readStream.format(FORMAT)
            .option("uri", self._uri)
            .option("batch_bytes", str(self._pipeline.batch_bytes))
            .option("tasks", str(tasks))
            .load()
        )
        checkpoint = checkpoint_uri(self._pipeline.lake_root)
        stream = frame.writeStream.option("checkpointLocation", checkpoint).foreachBatch(self._on_batch)
        if available_now:
            return stream.trigger(availableNow=True).start()
        return stream.trigger(processingTime=f"{self._pipeline.trigger_interval_s} seconds").start()

    def needed_above(self) -> LSN | None:
        """The lowest position above which a table has a right to changes; None while one is copied.

        0 when the position of one cannot be read: it may need all there is.
        """
        known = dict.fromkeys(self._caught_up.at(self.progress.version), self.progress.applied_lsn)
        return self._tables.needed_above(self._store.read_tables(self._pipeline.name).values(), known)

    def stop(self, query: StreamingQuery) -> None:
        """End between two batches; one that runs is finished first."""
        self._stopping = True
        with self.batch_lock:
            pass
        query.stop()

    def _on_batch(self, frame: DataFrame, _batch_id: int) -> None:
        with self.batch_lock:
            if self._stopping:
                raise _StoppedError
            try:
                with spark_errors("applying changes"):
                    self._apply(frame)
            except Exception as error:
                self.error = error
                raise

    def _apply(self, frame: DataFrame) -> None:
        started = time.monotonic()
        self.progress.idle_at = self._store.now()
        records = self._active_records()
        mark, results = self._run_items(frame, records)
        mark = self._settle_mark(mark)
        if mark.epoch < self._record.epoch:
            # Left over from before this epoch, whose snapshot holds it.
            self.progress.version, self.progress.batches = mark.to_version, self.progress.batches + 1
            return
        self._take(results, records, mark)
        self._look(records, results)
        lagging = self._caught_up.move(records, mark.from_version, mark.to_version)
        caught_up = self._catch_up(lagging, records, mark) if lagging else True
        self._write_point(records, mark)
        self._report(mark, results, started)
        self.progress.caught_up = caught_up
        if not caught_up:
            writer.mark(self._uri)

    def _active_records(self) -> dict[int, TableRecord]:
        """Tables to apply, by relation id; what is known of others, or older snapshots, is forgotten."""
        tables = self._store.read_tables(self._pipeline.name).values()
        active = {
            record.relation.oid: record
            for record in tables
            if record.state in _ACTIVE and record.relation is not None
        }
        # One that was stopped and let go on between two batches has to be looked at again.
        streaming = {oid: r for oid, r in active.items() if r.state is TableState.STREAMING}
        self._caught_up.forget_others({oid: snapshot_of(record) for oid, record in streaming.items()})
        return active

    def _run_items(
        self, frame: DataFrame, records: dict[int, TableRecord]
    ) -> tuple[WorkItem, list[TableResult]]:
        """One Spark task per share of items; those of lagging tables are left undone."""
        works = {
            oid: self._tables.work(records[oid], known.position, known.version)
            for oid, known in self._caught_up.items()
        }
        through = {oid: known.through for oid, known in self._caught_up.items()}
        rows = frame.mapInArrow(apply_items(works, through), RESULT).collect()
        return read_results(row.result for row in rows)

    def _look(self, records: dict[int, TableRecord], results: list[TableResult]) -> None:
        """Whether tables that nobody had to open are as they were left."""

        def fingerprint(oid: int, known: CaughtUpTable) -> str:
            return fingerprints_at(self._tables.work(records[oid]), known.version, known.history_version)

        untouched = records.keys() - {result.relation_id for result in results}
        for oid in self._caught_up.look(untouched, fingerprint, LOOK_INTERVAL_S):
            log.warning("table %s is not as this process left it: it is opened again", records[oid].table)

    def _settle_mark(self, mark: WorkItem) -> WorkItem:
        """Check the epoch; ask the changelog itself where the batch's commits do not say."""
        if self.progress.batches == 0 or not mark.epoch:
            mark = mark.as_recorded(self._uri)
        if mark.epoch > self._record.epoch:
            raise errors.FencedError(
                f"epoch {mark.epoch} of the changelog began, this process applies epoch {self._record.epoch}"
            )
        return replace(mark, durable_lsn=max(mark.durable_lsn, self.progress.applied_lsn + 1))

    def _take(self, results: list[TableResult], records: dict[int, TableRecord], mark: WorkItem) -> None:
        for result in results:
            record = records[result.relation_id]
            if result.relation is not None:
                # What the lake table itself says already, for people and for the sensor to see.
                relation = Relation.from_json(result.relation)
                self._store.record_relation(self._pipeline.name, relation, snapshot_of(record))
            if result.has_gone_back:
                log.warning("table %s has gone back to %s", record.table, LSN(result.position))
                self._caught_up.pop(result.relation_id, None)
            elif result.error is None:
                self._caught_up[result.relation_id] = CaughtUpTable(
                    snapshot_of(record),
                    mark.to_version,
                    result.version,
                    result.position,
                    result.history_version,
                    result.fingerprint,
                )
                self.progress.changes += result.changes
            else:
                self._caught_up.pop(result.relation_id, None)
                del records[result.relation_id]
                self._mark_errored(record, result)

    def _mark_errored(self, record: TableRecord, result: TableResult) -> None:
        """A table's own trouble stays its own; any other ends us, unless the table left meanwhile.

        A copy that was replaced during the batch may have refused what we had for it: the new one is looked
        at with the next batch.
        """
        now = self._store.read_tables(self._pipeline.name).get(record.table)
        if now is None or now.state not in _ACTIVE or now.position_lsn != record.position_lsn:
            return
        error = result.to_error(record.table)
        if result.stops_pipeline:
            raise error
        log.error("table %s stops: %s\n  hint: %s", record.table, error.message, error.hint)
        lsn = LSN(result.error_lsn) if result.error_lsn else None
        if not self._store.mark_errored(self._pipeline.name, now, error, lsn):
            log.info("table %s was changed by somebody else meanwhile", record.table)

    def _catch_up(self, lagging: list[int], records: dict[int, TableRecord], mark: WorkItem) -> bool:
        """Bring tables forward from the live files, a batch of bytes each; whether all have caught up now."""
        results, jobs = self._planner.plan({oid: records[oid] for oid in lagging}, LSN(mark.durable_lsn))
        planned = [job.work.relation.oid for job in jobs]
        if jobs:
            results += self._spark.sparkContext.parallelize(jobs, len(jobs)).map(CatchUp.run).collect()
        self._take(results, records, mark)
        unfinished = {job.work.relation.oid: job.reach_lsn for job in jobs if not job.is_last}
        for oid, reach in unfinished.items():
            if (known := self._caught_up.pop(oid, None)) is not None:
                self._planner.remember(oid, LSN(known.position), reach)
        for oid in set(lagging) & set(self._caught_up):
            if records[oid].state is TableState.CATCHING_UP and self._store.move(
                self._pipeline.name, records[oid], TableState.STREAMING
            ):
                log.info("table %s has caught up", records[oid].table)
        return not unfinished and all(oid in self._caught_up for oid in planned if oid in records)

    def _write_point(self, records: dict[int, TableRecord], mark: WorkItem) -> None:
        """When all streaming tables have caught up: a point names those with a snapshot not later than it."""
        # A position says that what committed at or before it is in; the durable LSN is where a commit ended.
        lsn = LSN(mark.durable_lsn - 1)
        if mark.last_commit_us:
            self.progress.commit_ts = datetime.fromtimestamp(mark.last_commit_us / 1e6, UTC)
        if any(r.state is TableState.STREAMING and oid not in self._caught_up for oid, r in records.items()):
            return
        named = {
            records[oid].table: known
            for oid, known in self._caught_up.items()
            if known.through == mark.to_version and known.snapshot <= lsn
        }
        latest, order = self._points.latest(), (self._record.epoch, lsn)
        passed = latest is not None and latest.order > order
        if not named or passed or any(known.position > lsn for known in named.values()):
            # With an old checkpoint, tables may be ahead of the batch: they do not show its moment any more.
            return
        commit_ts = self.progress.commit_ts
        if commit_ts is None and latest is not None and latest.epoch == self._record.epoch:
            commit_ts = latest.commit_ts
        tables, positions = versions_of(named), {str(table): known.position for table, known in named.items()}
        self._points.append(ConsistentPoint(self._record.epoch, lsn, commit_ts, tables, positions))
        self.progress.applied_lsn = lsn

    def _report(self, mark: WorkItem, results: list[TableResult], started: float) -> None:
        self.progress.version = mark.to_version
        self.progress.batches += 1
        changes = sum(result.changes for result in results)
        if changes:
            took = time.monotonic() - started
            log.debug("applied %d changes of %d tables in %.2f s", changes, len(results), took)


class _StoppedError(Exception):
    """Refuses a batch that would begin after the stop."""
