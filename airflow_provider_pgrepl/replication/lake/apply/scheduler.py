"""MergeRounds: round by round, takes what has ended, begins what is to be merged, makes consistent points."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.apply.applier_progress import ApplierProgress
from airflow_provider_pgrepl.replication.lake.apply.batch_ends import BatchEnd
from airflow_provider_pgrepl.replication.lake.apply.catch_up_planner import CatchUpPlanner, snapshot_of
from airflow_provider_pgrepl.replication.lake.apply.caught_up_tables import CaughtUpTable
from airflow_provider_pgrepl.replication.lake.apply.merge_lanes import MergeLanes
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob, Share, jobs_at_once
from airflow_provider_pgrepl.replication.lake.apply.point_writer import PointWriter
from airflow_provider_pgrepl.replication.lake.apply.schedule import BEFORE_ALL, TableSchedule
from airflow_provider_pgrepl.replication.lake.apply.share_runner import ShareRunner
from airflow_provider_pgrepl.replication.lake.apply.table_merge import fingerprints_at
from airflow_provider_pgrepl.replication.lake.apply.table_outcomes import ACTIVE, TableOutcomes
from airflow_provider_pgrepl.replication.lake.apply.table_records import RecordedTables
from airflow_provider_pgrepl.replication.lake.apply.table_result import TableResult
from airflow_provider_pgrepl.replication.lake.apply.work_item import WorkItem
from airflow_provider_pgrepl.replication.lake.apply.write_budget import Cadence
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 30.0
"""How often tables without changes are looked at: whether they still are as they were left."""

_RECORDS_S = 0.5
"""So long what is recorded of tables is believed, unless something has come since."""

_REPORT_S = 5.0
_LEAST_REST_S = 0.01


class MergeRounds:
    """All of it is called by who holds `changed`, which is notified when there is news."""

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        store: Store,
        record: EpochRecord,
        progress: ApplierProgress,
        changed: threading.Condition,
    ) -> None:
        self._pipeline = pipeline
        self._store = store
        self._progress = progress
        self._changed = changed
        self._records: dict[int, TableRecord] = {}
        self._read_at = -_RECORDS_S
        self._read_ts: datetime | None = None
        self._cadences: dict[TableName, Cadence] = {}
        self._begun_ts: dict[int, datetime | None] = {}
        self._ended: list[tuple[Share, list[TableResult], Exception | None]] = []
        points = Points(pipeline.lake_root)
        self._tables = RecordedTables(pipeline, record, points)
        self._planner = CatchUpPlanner(pipeline, record, self._tables)
        self._schedule = TableSchedule(self._cadence, pipeline.batch_bytes)
        self._outcomes = TableOutcomes(pipeline.name, store, self._schedule, self._planner, progress)
        self._points = PointWriter(points, record.epoch, self._schedule, progress, pipeline.points_every_s)
        self._runner = ShareRunner(spark, self._on_ended)
        self._lanes = MergeLanes(self._runner.slots, jobs_at_once(pipeline.lake_root))
        self._next_report = 0.0
        self.has_news = False

    def add(self, end: BatchEnd, begin: int, items: Iterable[WorkItem]) -> None:
        """A batch has come, of what was committed after the changelog's version `begin`."""
        self._schedule.add(end, begin, items, time.monotonic())
        self._read_at = -_RECORDS_S
        self.has_news = True

    def step(self, *, may_begin: bool, hurries: bool) -> None:
        """One round; `hurries`: nothing waits for its turn. Raises what ends the pipeline."""
        self.has_news = False
        now = time.monotonic()
        if self._schedule.newest == BEFORE_ALL:
            return
        self._read_records(now)
        self._take()
        if may_begin:
            self._look()
            self._plan(now)
            self._begin_due(now, hurries=hurries)
        self._points.write(self._records)
        self._report()

    @property
    def is_running(self) -> bool:
        """Whether a merge is."""
        return self._lanes.is_busy or bool(self._ended)

    @property
    def is_settled(self) -> bool:
        """Whether all tables have caught up with what has come."""
        return not self.has_news and not self.is_running and self._schedule.is_settled(self._records)

    @property
    def rest_s(self) -> float:
        """How long nothing is to be done but what news bring."""
        now = time.monotonic()
        if self._lanes.has_ready or self._lagging(now + _RECORDS_S):
            return _RECORDS_S
        turns = self._schedule.turns(now).values() if self._lanes.free else ()
        first = min((turn.at - now for turn in turns), default=LOOK_INTERVAL_S)
        return max(_LEAST_REST_S, min(first, self._points.rest_s(now), LOOK_INTERVAL_S))

    def needed_above(self) -> LSN | None:
        """As `Applier.needed_above`; by any thread."""
        with self._changed:
            known = {
                oid: self._progress.applied_lsn
                for oid, one in self._schedule.caught_up.items()
                if one.through >= self._progress.point_version
            }
        return self._tables.needed_above(self._store.read_tables(self._pipeline.name).values(), known)

    def close(self) -> None:
        """When no merge runs any more."""
        self._runner.close()

    def _on_ended(self, share: Share, results: list[TableResult], failed: Exception | None) -> None:
        with self._changed:
            self._ended.append((share, results, failed))
            self.has_news = True
            self._changed.notify_all()

    def _read_records(self, now: float) -> None:
        """Tables to apply; what is known of others, or of older snapshots, is forgotten."""
        if now - self._read_at < _RECORDS_S:
            return
        self._read_at, self._read_ts = now, self._store.now()
        tables = self._store.read_tables(self._pipeline.name).values()
        self._records = {
            record.relation.oid: record
            for record in tables
            if record.state in ACTIVE and record.relation is not None
        }
        # One that was stopped and let go on in between catches up again.
        streaming, catching_up = (
            {oid: snapshot_of(record) for oid, record in self._records.items() if record.state is state}
            for state in (TableState.STREAMING, TableState.CATCHING_UP)
        )
        self._schedule.follow(streaming, catching_up)

    def _take(self) -> None:
        ended, self._ended = self._ended, []
        for share, results, failed in ended:
            self._lanes.end(share, results)
            for result in results:
                self._outcomes.take(result, self._records.get(result.relation_id))
                self._begun_ts.pop(result.relation_id, None)
                self._read_at = -_RECORDS_S
            if failed is not None:
                raise failed

    def _look(self) -> None:
        """Whether tables that nobody has opened are as they were left."""

        def fingerprint(oid: int, known: CaughtUpTable) -> str:
            work = self._tables.work(self._records[oid])
            return fingerprints_at(work, known.version, known.history_version)

        untouched = self._records.keys() - self._schedule.running.keys() - self._schedule.waiting.keys()
        for oid in self._schedule.caught_up.look(untouched, fingerprint, LOOK_INTERVAL_S):
            table = self._records[oid].table
            log.warning("table %s is not as this process left it: it is opened again", table)

    def _lagging(self, now: float) -> list[int]:
        return self._schedule.lagging(self._records, now)

    def _plan(self, now: float) -> None:
        """Have tables that lag behind brought forward from the changelog's live files."""
        lagging = {oid: self._records[oid] for oid in self._lagging(now)}
        if not lagging:
            return
        results, jobs = self._planner.plan(lagging, self._schedule.ends[self._schedule.newest])
        for result in results:
            self._outcomes.mark_errored(self._records.pop(result.relation_id), result)
        self._start(jobs, now)

    def _begin_due(self, now: float, *, hurries: bool) -> None:
        due = (oid for oid, turn in self._schedule.turns(now).items() if hurries or turn.at <= now)
        waiting = self._schedule.waiting
        longest_first = sorted(due, key=lambda oid: waiting[oid].first.since)
        chosen = self._lanes.choose(longest_first, self._takes_s)
        self._start([self._job(oid) for oid in chosen], now)
        for share in self._lanes.begin(self._expected_s, now):
            self._runner.run(share)

    def _takes_s(self, oid: int) -> float:
        return self._schedule.pace(oid).expected_s(self._schedule.waiting[oid].first.bytes)

    def _job(self, oid: int) -> MergeJob:
        known, record = self._schedule.caught_up[oid], self._records[oid]
        portion, through = self._schedule.next_of(oid)
        work = self._tables.work(record, known.position, known.version)
        return MergeJob(work, known.snapshot, through, portion.paths, portion.bytes)

    def _start(self, jobs: Collection[MergeJob], now: float) -> None:
        for job in jobs:
            self._schedule.start(job.oid, job, now)
            self._begun_ts[job.oid] = self._read_ts
            self._lanes.add(job)

    def _expected_s(self, job: MergeJob) -> float:
        return self._schedule.pace(job.oid).expected_s(job.bytes)

    def _cadence(self, oid: int) -> Cadence:
        table = self._records[oid].table
        if table not in self._cadences:
            policy = self._pipeline.choices(table).policy
            self._cadences[table] = Cadence(
                policy.freshness_s,
                policy.max_staleness_s,
                policy.write_amplification,
                self._pipeline.points_bytes,
            )
        return self._cadences[table]

    def _report(self) -> None:
        progress, schedule = self._progress, self._schedule
        through = schedule.through(self._records)
        known = progress.version if through == BEFORE_ALL else through
        progress.version = min(known, schedule.newest)
        progress.caught_up = self.is_settled
        if (now := time.monotonic()) >= self._next_report:
            self._next_report = now + _REPORT_S
            self._lanes.slots = self._runner.slots
            progress.merges = {
                record.table.path: merges
                for oid, record in self._records.items()
                if (merges := schedule.merges(oid, now)) is not None
            }
        begun = [moment for moment in self._begun_ts.values() if moment is not None]
        progress.idle_at = min(begun, default=self._read_ts)
