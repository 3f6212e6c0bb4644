"""The applier: changelog commits into lake tables, batch by batch, one consistent point after each.

A table's position in the lake is the truth; what the applier remembers only saves looking. A table it does
not know to be level with the stream (after a start, a snapshot, an error mended) is brought forward from the
changelog's live files, whatever Spark's checkpoint says, while the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog import reader, writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri, system_folder
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.history.place import history_key
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.recorded_tables import RecordedTables
from airflow_provider_pgrepl.replication.lake.shares import (
    RESULT,
    CatchUp,
    apply_items,
    read_results,
    warm_up,
)
from airflow_provider_pgrepl.replication.lake.spark_failures import spark_errors
from airflow_provider_pgrepl.replication.lake.table import RESNAPSHOT_HINT, open_table, read_position
from airflow_provider_pgrepl.replication.lake.table_work import TableResult, TableWork
from airflow_provider_pgrepl.replication.lake.work import FORMAT, ChangelogSource
from airflow_provider_pgrepl.replication.lake.work_item import WorkItem
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.state.store import Store, TableRecord
from airflow_provider_pgrepl.replication.state.table_state import TableState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_ACTIVE = (TableState.CATCHING_UP, TableState.STREAMING)


@dataclass
class ApplierProgress:
    """`version`: the changelog version up to which all streaming tables are; `applied_lsn` likewise.

    `level`: whether the last batch left none of them behind; what is left comes with the next one.
    `idle_at`: when the last batch began, by the clock of the state database: no earlier one was running then.
    """

    version: int = -1
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_ts: datetime | None = None
    changes: int = 0
    batches: int = 0
    level: bool = False
    idle_at: datetime | None = None


@dataclass(frozen=True)
class _Level:
    """What is known of a table: taken at which snapshot, level with which changelog version, at which own
    version and position, and its history, if it keeps one, at which version."""

    snapshot: LSN
    through: int
    version: int
    position: int
    history_version: int | None


class Applier:
    """Runs the streaming query. `error` holds what ended it, when something did."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, store: Store, record: EpochRecord) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._store = store
        self._record = record
        self._uri = changelog_uri(pipeline.lake_root)
        self._points = Points(pipeline.lake_root)
        self._tables = RecordedTables(pipeline, record, self._points)
        self._levels: dict[int, _Level] = {}
        # Files that hold no change of a table do not move its position: they must not be taken for ever.
        self._looked_through: dict[int, LSN] = {}
        self._stopping = False
        self._is_warm = False
        self.batch_lock = threading.Lock()
        """Held while a batch runs: whoever holds it knows that nothing is being applied."""
        self.progress = ApplierProgress()
        self.error: Exception | None = None
        spark.dataSource.register(ChangelogSource)

    def start(self, *, available_now: bool = False) -> StreamingQuery:
        """Begin to apply: for good, or what the changelog holds now. Raises SparkError."""
        with spark_errors("starting the streaming query"):
            return self._start(available_now=available_now)

    def _start(self, *, available_now: bool) -> StreamingQuery:
        tasks = max(1, self._spark.sparkContext.defaultParallelism)
        if not self._is_warm:
            warm_up(self._spark, tasks)
            self._is_warm = True
        frame = (
            self._spark.readStream.format(FORMAT)
            .option("uri", self._uri)
            .option("batch_bytes", str(self._pipeline.batch_bytes))
            .option("tasks", str(tasks))
            .load()
        )
        checkpoint = f"{system_folder(self._pipeline.lake_root)}/checkpoint"
        stream = frame.writeStream.option("checkpointLocation", checkpoint).foreachBatch(self._on_batch)
        if available_now:
            return stream.trigger(availableNow=True).start()
        return stream.trigger(processingTime=f"{self._pipeline.trigger_interval_s} seconds").start()

    def needed_above(self) -> LSN | None:
        """The lowest position above which a table has a right to changes; None while one is copied."""
        levels, version, applied = self._levels, self.progress.version, self.progress.applied_lsn
        needed = []
        for record in self._store.read_tables(self._pipeline.name).values():
            if record.state is TableState.SNAPSHOTTING:
                return None
            if record.relation is None or record.state not in (*_ACTIVE, TableState.PAUSED):
                continue
            level = levels.get(record.relation.oid)
            is_level = level is not None and level.through == version
            needed.append(applied if is_level else self._position_of(record))
        return min(needed, default=None)

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
        works = {oid: self._work_of(record) for oid, record in records.items()}
        levels = {oid: level.through for oid, level in self._levels.items()}
        mark, results = self._run_items(frame, works, levels)
        mark = self._settle_mark(mark)
        if mark.epoch < self._record.epoch:
            # Left over from before this epoch, whose snapshot holds it.
            self.progress.version, self.progress.batches = mark.to_version, self.progress.batches + 1
            return
        self._take(results, records, mark)
        behind = self._find_behind(records, mark)
        level = self._catch_up(behind, records, works, mark) if behind else True
        self._write_point(records, mark)
        self._report(mark, results, started)
        self.progress.level = level
        if not level:
            writer.mark(self._uri)

    def _active_records(self) -> dict[int, TableRecord]:
        """Tables to apply, by relation id; what is known of others, or older snapshots, is forgotten."""
        tables = self._store.read_tables(self._pipeline.name).values()
        active = {
            record.relation.oid: record
            for record in tables
            if record.state in _ACTIVE and record.relation is not None
        }
        self._levels = {
            oid: level
            for oid, level in self._levels.items()
            if oid in active
            # One that was stopped and let go on between two batches has to be looked at again.
            and active[oid].state is TableState.STREAMING
            and level.snapshot == _snapshot_of(active[oid])
        }
        return active

    def _work_of(self, record: TableRecord) -> TableWork:
        assert record.relation is not None
        level = self._levels.get(record.relation.oid)
        return self._tables.work(record, None if level is None else level.version)

    def _run_items(
        self, frame: DataFrame, works: dict[int, TableWork], levels: dict[int, int]
    ) -> tuple[WorkItem, list[TableResult]]:
        """One Spark task per share of items; those of tables not level with the stream come back undone."""
        rows = frame.mapInArrow(apply_items(works, levels), RESULT).collect()
        return read_results(row.result for row in rows)

    def _settle_mark(self, mark: WorkItem) -> WorkItem:
        """Check the epoch; ask the changelog itself where the batch's commits do not say."""
        if self.progress.batches == 0 or not mark.epoch:
            table = DeltaTable(self._uri, version=mark.to_version)
            epoch = reader.read_epoch_number(table)
            mark = replace(mark, epoch=epoch, durable_lsn=reader.read_durable_lsn(table))
        if mark.epoch > self._record.epoch:
            raise errors.FencedError(
                f"epoch {mark.epoch} of the changelog began, this process applies epoch {self._record.epoch}"
            )
        return replace(mark, durable_lsn=max(mark.durable_lsn, self.progress.applied_lsn + 1))

    def _take(self, results: list[TableResult], records: dict[int, TableRecord], mark: WorkItem) -> None:
        for result in results:
            record = records[result.relation_id]
            if result.relation is not None:
                self._record_relation(record, Relation.from_json(result.relation))
            if result.error is None:
                self._levels[result.relation_id] = _Level(
                    _snapshot_of(record),
                    mark.to_version,
                    result.version,
                    result.position,
                    result.history_version,
                )
                self.progress.changes += result.changes
            else:
                self._levels.pop(result.relation_id, None)
                del records[result.relation_id]
                self._put_in_error(record, result)

    def _record_relation(self, record: TableRecord, relation: Relation) -> None:
        """What the lake table itself says already, for people and for the sensor to see."""
        self._store.record_relation(self._pipeline.name, relation, _snapshot_of(record))

    def _put_in_error(self, record: TableRecord, result: TableResult) -> None:
        """A table's own trouble stays its own; any other ends us, unless the table left meanwhile.

        A copy that was replaced during the batch may have refused what we had for it: the new one is looked
        at with the next batch.
        """
        now = self._store.read_tables(self._pipeline.name).get(record.table)
        if now is None or now.state not in _ACTIVE or now.position_lsn != record.position_lsn:
            return
        if result.stops_pipeline:
            stops: type[errors.PgReplError] = getattr(errors, result.error_kind, errors.LakeUnavailableError)
            raise stops(str(result.error), result.hint)
        hint = f"\n  hint: {result.hint}" if result.hint else ""
        log.error("table %s stops: %s%s", record.table, result.error, hint)
        kind = getattr(errors, result.error_kind, errors.LakeTableError)
        error = kind(str(result.error), result.hint, result.remedy)
        lsn = LSN(result.error_lsn) if result.error_lsn else None
        if not self._store.mark_errored(self._pipeline.name, now, error, lsn):
            log.info("table %s was changed by somebody else meanwhile", record.table)

    def _position_of(self, record: TableRecord) -> LSN:
        """Up to where the lake table is whole: its own position, or a later point that names it."""
        work = self._work_of(record)
        try:
            found = read_position(open_table(work.uri), work.app) or LSN(0)
        except errors.PgReplError:
            # Whoever works on the table meets the same, and reports it as the table's own error.
            found = LSN(0)
        point = self._points.last_of(record.table, self._record.epoch)
        return max(found, _snapshot_of(record), LSN(point.lsn) if point else LSN(0))

    def _find_behind(self, records: dict[int, TableRecord], mark: WorkItem) -> list[int]:
        """Tables not level with the batch's end. One that was level and had no work is level again."""
        behind = []
        for oid in records:
            level = self._levels.get(oid)
            if level is not None and level.through == mark.from_version:
                self._levels[oid] = replace(level, through=mark.to_version)
            elif level is None or level.through != mark.to_version:
                behind.append(oid)
        return behind

    def _catch_up(
        self, behind: list[int], records: dict[int, TableRecord], works: dict[int, TableWork], mark: WorkItem
    ) -> bool:
        """Bring tables forward from the live files, a batch of bytes each; whether all are level now."""
        changelog, upto = reader.open_changelog(self._uri), LSN(mark.durable_lsn)
        floor = reader.read_floor_lsn(changelog, self._record.epoch)
        positions = {oid: self._position_of(records[oid]) for oid in behind}
        results = [_too_old(oid, above, floor) for oid, above in positions.items() if above < floor]
        needed = {
            oid: max(above, self._looked_through.get(oid, LSN(0)))
            for oid, above in positions.items()
            if above >= floor
        }
        # Listed once: it costs the more the longer changes are kept, whatever the table.
        lowest = min(needed.values(), default=LSN(0))
        files = reader.live_files(changelog, self._record.epoch, lowest) if needed else []
        jobs = [
            CatchUp.plan(
                works[oid],
                [file for file in files if file.max_lsn > above],
                upto,
                self._pipeline.batch_bytes,
            )
            for oid, above in needed.items()
        ]
        if jobs:
            results += self._spark.sparkContext.parallelize(jobs, len(jobs)).map(CatchUp.run).collect()
        self._take(results, records, mark)
        unfinished = {job.work.relation.oid: job.reach_lsn for job in jobs if not job.is_last}
        for oid, reach in unfinished.items():
            if self._levels.pop(oid, None) is not None:
                self._looked_through[oid] = reach
        for oid in set(behind) & set(self._levels):
            if records[oid].state is TableState.CATCHING_UP and self._store.move(
                self._pipeline.name, records[oid], TableState.STREAMING
            ):
                log.info("table %s is level with the stream", records[oid].table)
        return not unfinished

    def _write_point(self, records: dict[int, TableRecord], mark: WorkItem) -> None:
        """When all streaming tables are level: a point names those whose snapshot is not later than it."""
        # A position says that what committed at or before it is in; the durable LSN is where a commit ended.
        lsn = LSN(mark.durable_lsn - 1)
        if mark.last_commit_us:
            self.progress.commit_ts = datetime.fromtimestamp(mark.last_commit_us / 1e6, UTC)
        if any(r.state is TableState.STREAMING and oid not in self._levels for oid, r in records.items()):
            return
        named = {
            records[oid].table: level
            for oid, level in self._levels.items()
            if level.through == mark.to_version and level.snapshot <= lsn
        }
        latest = self._points.latest()
        passed = latest is not None and latest.order > (self._record.epoch, lsn)
        if not named or passed or any(level.position > lsn for level in named.values()):
            # With an old checkpoint, tables may be ahead of the batch: they do not show its moment any more.
            return
        tables = {str(table): level.version for table, level in named.items()}
        tables |= {
            history_key(table): level.history_version
            for table, level in named.items()
            if level.history_version is not None
        }
        commit_ts = self.progress.commit_ts
        if commit_ts is None and latest is not None and latest.epoch == self._record.epoch:
            commit_ts = latest.commit_ts
        point = ConsistentPoint(self._record.epoch, lsn, commit_ts, tables)
        self._points.append(point)
        self.progress.applied_lsn = lsn

    def _report(self, mark: WorkItem, results: list[TableResult], started: float) -> None:
        self.progress.version = mark.to_version
        self.progress.batches += 1
        changes = sum(result.changes for result in results)
        if changes:
            seconds = time.monotonic() - started
            log.debug("applied %d changes of %d tables in %.2f s", changes, len(results), seconds)


def _snapshot_of(record: TableRecord) -> LSN:
    return record.position_lsn or LSN(0)


def _too_old(relation_id: int, position: LSN, floor: LSN) -> TableResult:
    return TableResult(
        relation_id,
        error_kind="ChangelogError",
        error=f"the table is at {position}, but the changelog holds changes above {floor} only",
        hint=RESNAPSHOT_HINT,
    )


class _StoppedError(Exception):
    """Refuses a batch that would begin after the stop."""
