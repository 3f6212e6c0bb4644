"""The applier: changelog commits into lake tables, batch by batch, one consistent point after each.

A table's position in the lake is the truth; what the applier remembers only saves looking. A table it does
not know to be level with the stream (after a start, a snapshot, an error mended) is brought forward from the
changelog's live files, whatever Spark's checkpoint says, while the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.replication.changelog import reader, writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri, system_folder
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.table import app_id, open_table, read_position
from airflow_provider_pgrepl.replication.lake.table_work import TableResult, TableWork, bring_forward
from airflow_provider_pgrepl.replication.lake.work import FORMAT, MARK, ChangelogSource, WorkItem
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.state.store import Store, TableRecord
from airflow_provider_pgrepl.replication.state.table_state import TableState

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

log = logging.getLogger(__name__)

_RESULT = "result string"
_ACTIVE = (TableState.CATCHING_UP, TableState.STREAMING)


@dataclass
class ApplierProgress:
    """`version`: the changelog version up to which all streaming tables are; `applied_lsn` likewise."""

    version: int = -1
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    commit_ts: datetime | None = None
    changes: int = 0
    batches: int = 0


@dataclass(frozen=True)
class _Level:
    """What is known of a table: taken at which snapshot, level with which changelog version, at which own."""

    snapshot: LSN
    through: int
    version: int


class Applier:
    """Runs the streaming query. `error` holds what ended it, when something did."""

    def __init__(self, spark: SparkSession, pipeline: Pipeline, store: Store, record: EpochRecord) -> None:
        self._spark = spark
        self._pipeline = pipeline
        self._store = store
        self._record = record
        self._uri = changelog_uri(pipeline.lake_root)
        self._points = Points(pipeline.lake_root)
        self._levels: dict[int, _Level] = {}
        self._stopping = False
        self.batch_lock = threading.Lock()
        """Held while a batch runs: whoever holds it knows that nothing is being applied."""
        self.progress = ApplierProgress()
        self.error: Exception | None = None
        spark.dataSource.register(ChangelogSource)

    def start(self, *, available_now: bool = False) -> StreamingQuery:
        """Begin to apply: for good, or what the changelog holds now."""
        tasks = str(max(1, self._spark.sparkContext.defaultParallelism))
        frame = (
            self._spark.readStream.format(FORMAT)
            .option("uri", self._uri)
            .option("batch_bytes", str(self._pipeline.batch_bytes))
            .option("tasks", tasks)
            .load()
        )
        checkpoint = f"{system_folder(self._pipeline.lake_root)}/checkpoint"
        stream = frame.writeStream.option("checkpointLocation", checkpoint).foreachBatch(self._on_batch)
        if available_now:
            return stream.trigger(availableNow=True).start()
        return stream.trigger(processingTime=f"{self._pipeline.trigger_interval_s} seconds").start()

    def needed_above(self) -> LSN | None:
        """The lowest position above which a table has a right to changes; None while one is copied."""
        needed = []
        for record in self._store.read_tables(self._pipeline.name).values():
            if record.state is TableState.SNAPSHOTTING:
                return None
            if record.state is TableState.STREAMING:
                needed.append(self.progress.applied_lsn)
            elif record.state in (TableState.CATCHING_UP, TableState.PAUSED):
                needed.append(_snapshot_of(record))
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
                self._apply(frame)
            except Exception as error:
                self.error = error
                raise

    def _apply(self, frame: DataFrame) -> None:
        started = time.monotonic()
        records = self._active_records()
        works = {oid: self._work_of(record) for oid, record in records.items()}
        levels = {oid: level.through for oid, level in self._levels.items()}
        mark, results = self._run_items(frame, works, levels)
        mark = self._settle_mark(mark)
        self._take(results, records, mark)
        behind = self._find_behind(records, results, mark)
        level = self._catch_up(behind, records, works, mark) if behind else True
        self._write_point(records, mark)
        self._report(mark, results, started)
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
            if oid in active and level.snapshot == _snapshot_of(active[oid])
        }
        return active

    def _work_of(self, record: TableRecord) -> TableWork:
        assert record.relation is not None
        return TableWork(
            record.relation, self._pipeline, app_id(self._pipeline.name, self._record.epoch), self._uri
        )

    def _run_items(
        self, frame: DataFrame, works: dict[int, TableWork], levels: dict[int, int]
    ) -> tuple[WorkItem, list[TableResult]]:
        """One Spark task per share of items; those of tables not level with the stream come back undone."""
        rows = frame.mapInArrow(_apply_items(works, levels), _RESULT).collect()
        texts = [row.result for row in rows]
        marks = [WorkItem.from_json(text[1:]) for text in texts if text[0] == "M"]
        return marks[0], [TableResult.from_json(text[1:]) for text in texts if text[0] == "R"]

    def _settle_mark(self, mark: WorkItem) -> WorkItem:
        """Check the epoch; ask the changelog itself where the batch's commits do not say."""
        if self.progress.batches == 0 or not mark.epoch:
            table = DeltaTable(self._uri, version=mark.to_version)
            epoch = reader.read_epoch_number(table)
            mark = replace(mark, epoch=epoch, durable_lsn=reader.read_durable_lsn(table))
        if mark.epoch != self._record.epoch:
            raise errors.FencedError(
                f"epoch {mark.epoch} of the changelog began, this process applies epoch {self._record.epoch}"
            )
        return replace(mark, durable_lsn=max(mark.durable_lsn, self.progress.applied_lsn + 1))

    def _take(self, results: list[TableResult], records: dict[int, TableRecord], mark: WorkItem) -> None:
        for result in results:
            record = records[result.relation_id]
            if result.error is None:
                self._levels[result.relation_id] = _Level(
                    _snapshot_of(record), mark.to_version, result.version
                )
                self.progress.changes += result.changes
            else:
                self._levels.pop(result.relation_id, None)
                self._put_in_error(record, result)

    def _put_in_error(self, record: TableRecord, result: TableResult) -> None:
        """A table's own trouble stays its own; any other ends us, unless the table left meanwhile."""
        now = self._store.read_tables(self._pipeline.name).get(record.table)
        if now is None or now.state not in _ACTIVE:
            return
        if result.stops_pipeline:
            kind: type[errors.PgReplError] = getattr(errors, result.error_kind, errors.LakeUnavailableError)
            raise kind(str(result.error), result.hint)
        log.error("table %s stops: %s", record.table, result.error)
        self._store.set_state(
            self._pipeline.name,
            record.table,
            TableState.ERRORED,
            reason=str(result.error),
            hint=result.hint,
            lsn=LSN(result.error_lsn) if result.error_lsn else None,
        )

    def _find_behind(
        self, records: dict[int, TableRecord], results: list[TableResult], mark: WorkItem
    ) -> list[int]:
        """Tables not level with the batch's end. One that was level and had no work is level again."""
        failed = {result.relation_id for result in results if result.error is not None}
        behind = []
        for oid in records:
            level = self._levels.get(oid)
            if level is not None and level.through == mark.from_version:
                self._levels[oid] = _Level(level.snapshot, mark.to_version, level.version)
            elif (level is None or level.through != mark.to_version) and oid not in failed:
                behind.append(oid)
        return behind

    def _catch_up(
        self, behind: list[int], records: dict[int, TableRecord], works: dict[int, TableWork], mark: WorkItem
    ) -> bool:
        """Bring tables forward from the live files, a batch of bytes each; whether all are level now."""
        changelog, upto = reader.open_changelog(self._uri), LSN(mark.durable_lsn)
        jobs, unfinished = [], set()
        for oid in behind:
            above = max(_snapshot_of(records[oid]), _position_of(works[oid]))
            files = reader.live_files(changelog, self._record.epoch, above)
            files = [file for file in files if file.may_hold(oid) and file.min_lsn < upto]
            taken = _take_bytes(files, self._pipeline.batch_bytes)
            if len(taken) < len(files):
                unfinished.add(oid)
            jobs.append((works[oid], [file.path for file in taken]))
        run: Callable[[tuple[TableWork, list[str]]], TableResult] = _catch_up_task(upto)
        results = self._spark.sparkContext.parallelize(jobs, len(jobs)).map(run).collect()
        self._take(results, records, mark)
        for oid in unfinished:
            self._levels.pop(oid, None)
        for oid in set(behind) & set(self._levels):
            if records[oid].state is TableState.CATCHING_UP:
                self._store.set_state(self._pipeline.name, records[oid].table, TableState.STREAMING)
                log.info("table %s is level with the stream", records[oid].table)
        return not unfinished

    def _write_point(self, records: dict[int, TableRecord], mark: WorkItem) -> None:
        """A point names the tables that are level and whose snapshot is not later than it."""
        # A position says that what committed at or before it is in; the durable LSN is where a commit ended.
        lsn = LSN(mark.durable_lsn - 1)
        if mark.last_commit_us:
            self.progress.commit_ts = datetime.fromtimestamp(mark.last_commit_us / 1e6, UTC)
        tables = {
            str(records[oid].table): level.version
            for oid, level in self._levels.items()
            if level.through == mark.to_version and level.snapshot <= lsn
        }
        if not tables:
            return
        point = ConsistentPoint(self._record.epoch, lsn, self.progress.commit_ts, tables)
        self._points.append(point)
        self.progress.applied_lsn = lsn

    def _report(self, mark: WorkItem, results: list[TableResult], started: float) -> None:
        self.progress.version = mark.to_version
        self.progress.batches += 1
        changes = sum(result.changes for result in results)
        if changes:
            seconds = time.monotonic() - started
            log.info("applied %d changes of %d tables in %.2f s", changes, len(results), seconds)


def _snapshot_of(record: TableRecord) -> LSN:
    return record.position_lsn or LSN(0)


def _position_of(work: TableWork) -> LSN:
    try:
        return read_position(open_table(work.uri), work.app) or LSN(0)
    except errors.PgReplError:
        # The task meets the same and reports it as the table's own error.
        return LSN(0)


class _StoppedError(Exception):
    """Refuses a batch that would begin after the stop."""


def _take_bytes(files: list[reader.ChangelogFile], limit: int) -> list[reader.ChangelogFile]:
    """The first files up to a size, never parting files that may share a transaction."""
    taken: list[reader.ChangelogFile] = []
    size, reach = 0, LSN(0)
    for file in files:
        if size >= limit and file.min_lsn > reach:
            break
        taken.append(file)
        size += file.value_bytes
        reach = max(reach, file.max_lsn)
    return taken


def _apply_items(
    works: dict[int, TableWork], levels: dict[int, int]
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def apply(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            items = [WorkItem.from_json(text) for text in batch.column(0).to_pylist()]
            mark = [f"M{item.to_json()}" for item in items if item.relation_id == MARK]
            results = [
                "R" + bring_forward(works[item.relation_id], item.paths, _END).to_json()
                for item in items
                if item.relation_id in works and levels.get(item.relation_id) == item.from_version
            ]
            yield pa.RecordBatch.from_pydict({"result": pa.array([*mark, *results], pa.string())})

    return apply


_END = LSN(2**63 - 1)


def _catch_up_task(upto: LSN) -> Callable[[tuple[TableWork, list[str]]], TableResult]:
    return lambda job: bring_forward(job[0], job[1], upto)
