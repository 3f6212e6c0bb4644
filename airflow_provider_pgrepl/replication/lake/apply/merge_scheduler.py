"""The merge scheduler: rounds that take finished merges, start due merges, and write consistent points."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    TablePosition,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from .merge_policy import MergePolicy
from .merge_task import MergeJob, MergeSlots, MergeTaskPool, Share, jobs_at_once
from .table_merge import TableContext, TableResult, fingerprints_at
from .table_records import RecordedTables
from .table_schedule import BEFORE_ALL, CaughtUpTable, TableSchedule, versions_of
from .work_item import ApplierProgress, BatchEnd, WorkItem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)
LOOK_INTERVAL_S = 30.0
"""Seconds between checks that tables without changes are as this process left them."""
_RECORDS_S = 0.5
"""Seconds for which table records that were read from the state database are used, unless a batch or a result
arrives."""
_REPORT_S = 5.0
_LEAST_REST_S = 0.01


class PointWriter:
    """Writes the consistent points of one run of the applier."""

    def __init__(
        self,
        points: ConsistentPoints,
        epoch: Epoch,
        schedule: TableSchedule,
        progress: ApplierProgress,
        every_s: float,
    ) -> None:
        self._points = points
        self._epoch = epoch
        self._schedule = schedule
        self._progress = progress
        self._every_s = every_s
        self._version = BEFORE_ALL
        self._named: frozenset[int] = frozenset()
        self._next_boundary = time.monotonic() + every_s

    def write(self, records: Mapping[int, TableRecord]) -> None:
        """Append the newest consistent point of these tables that is possible, if it is newer than the last
        one or names tables that the last one lacks. Raises what `ConsistentPoints.append` does.

        If no point was made for `every_s` seconds, set a boundary for the merges.
        """
        schedule = self._schedule
        if schedule.newest < self._version:
            self._version = BEFORE_ALL
        needed = [oid for oid, record in records.items() if record.state is TableState.STREAMING]
        version = schedule.common(needed)
        if version is not None and (version > self._version or self._lacks(records, version)):
            self._append(records, version)
            self._version = version
            self._next_boundary = time.monotonic() + self._every_s
        schedule.forget_before(self._version, needed)
        self._set_boundary(needed)

    def _lacks(self, records: Mapping[int, TableRecord], version: int) -> bool:
        """Return True if this version already has a point that lacks some of these tables, and all tables
        have caught up by now."""
        is_settled = version == self._version == self._schedule.newest and self._schedule.is_settled(records)
        return is_settled and not self._named >= records.keys()

    def _append(self, records: Mapping[int, TableRecord], version: int) -> None:
        """Append a point at a version of the changelog. It names each table whose last copy is not after the
        point.

        Appends nothing if no table can be named, if a later point exists, or if a table contains changes
        after the point.
        """
        end = self._schedule.ends[version]
        self._progress.commit_ts = end.commit_ts or self._progress.commit_ts
        named = {
            record.table: known
            for oid, record in records.items()
            if (known := self._schedule.caught_up.at(oid, version)) and known.snapshot <= end.lsn
        }
        latest, order = self._points.latest(), (self._epoch, end.lsn)
        passed = latest is not None and latest.order > order
        if not named or passed or any(known.position > end.lsn for known in named.values()):
            # A table that contains later changes does not show the source as of the point.
            return
        commit_ts = self._progress.commit_ts
        if commit_ts is None and latest is not None and latest.epoch == self._epoch:
            commit_ts = latest.commit_ts
        self._named = frozenset(oid for oid in records if self._schedule.caught_up.at(oid, version))
        positions = {str(table): known.position for table, known in named.items()}
        self._points.append(ConsistentPoint(self._epoch, end.lsn, commit_ts, versions_of(named), positions))
        self._progress.applied_lsn, self._progress.point_version = end.lsn, version

    def rest_s(self, now: float) -> float:
        """Return the seconds until a boundary is due, if no point is made before."""
        # Changes may wait also if the point is the newest: of a table that began to stream after it.
        if self._schedule.newest <= self._version and not self._schedule.waiting:
            return self._every_s
        return max(0.0, self._next_boundary - now)

    def _set_boundary(self, needed: list[int]) -> None:
        """Seal the waiting changes of all tables if a boundary is due: tables that are merged at different
        paces may never be at the same version otherwise."""
        now = time.monotonic()
        if self.rest_s(now) > 0:
            return
        self._next_boundary = now + self._every_s
        if not self._schedule.is_passing(needed, self._version):
            self._schedule.seal()


def snapshot_of(record: TableRecord) -> LSN:
    """Return the position at which the table was copied, 0 if it has none."""
    return record.position_lsn or LSN(0)


class CatchUpPlanner:
    """Plans the next merge of each lagging table from the changelog's live files."""

    def __init__(self, pipeline: Pipeline, record: EpochRecord, tables: RecordedTables) -> None:
        self._pipeline = pipeline
        self._record = record
        self._tables = tables
        # Files without a change of the table do not advance its position, and would be selected again and
        # again. So record up to which LSN files were read, together with the table's position at that time.
        self._looked_through: dict[int, tuple[LSN, LSN]] = {}

    def plan(
        self, behind: Mapping[int, TableRecord], end: BatchEnd
    ) -> tuple[list[TableResult], list[MergeJob]]:
        """Return the errors of tables that cannot catch up, and the jobs of the others. The jobs apply
        changes up to the end of a batch."""
        changelog = reader.open_changelog(changelog_uri(self._pipeline.lake_root))
        floor = reader.read_floor_lsn(changelog, self._record.epoch)
        kept = floor, reader.read_durable_lsn(changelog)
        positions = {oid: self._tables.table_position(record) for oid, record in behind.items()}
        refused = {
            oid: TableResult.of_error(oid, problem)
            for oid, position in positions.items()
            if position and (problem := position.problem(snapshot_of(behind[oid]), *kept))
        }
        needed = {oid: self._needed(oid, positions[oid]) for oid in behind if oid not in refused}
        # List the files once for all tables: listing takes longer the more hours the changelog keeps.
        lowest = min(needed.values(), default=LSN(0))
        files = reader.live_files(changelog, self._record.epoch, lowest) if needed else []
        jobs = [
            MergeJob.plan(
                self._work(behind[oid], positions[oid]),
                snapshot_of(behind[oid]),
                [file for file in files if file.max_lsn > above],
                (end.version, LSN(end.lsn + 1)),
                self._pipeline.batch_bytes,
            )
            for oid, above in needed.items()
        ]
        return list(refused.values()), jobs

    def remember(self, oid: int, position: LSN, reach: LSN) -> None:
        """Record that files up to `reach` were read for a table that is still at `position`."""
        self._looked_through[oid] = position, reach

    def _needed(self, oid: int, position: TablePosition | None) -> LSN:
        """Return the LSN above which the table needs changes from the changelog."""
        if position is None:
            return LSN(0)
        then, reach = self._looked_through.get(oid, (LSN(0), LSN(0)))
        return max(position.whole, reach) if then <= position.own else position.whole

    def _work(self, record: TableRecord, position: TablePosition | None) -> TableContext:
        if position is None:
            return self._tables.work(record)
        return self._tables.work(record, position.own, position.known)


class TableOutcomes:
    """Applies the results of merges to the schedule and to the records of tables."""

    def __init__(
        self,
        pipeline: str,
        state_db: StateDatabase,
        schedule: TableSchedule,
        planner: CatchUpPlanner,
        progress: ApplierProgress,
    ) -> None:
        self._pipeline = pipeline
        self._state_db = state_db
        self._schedule = schedule
        self._planner = planner
        self._progress = progress

    def take(self, result: TableResult, record: TableRecord | None) -> None:
        """Apply one result. `record`: the current record of the table, None if its changes are no longer
        applied.

        Raises the error if it stops the pipeline, and not only the table.
        """
        oid, job, now = result.relation_id, self._schedule.running[result.relation_id], time.monotonic()
        self._schedule.pace(oid).end(
            now,
            result.seconds,
            result.bytes_written,
            result.bytes_changed,
            listed=job.bytes,
            live=result.bytes_live,
        )
        self._progress.merges_ended += 1
        self._progress.merge_seconds += result.seconds
        self._progress.merged_bytes += result.bytes_written
        caught_up = None
        if result.error is not None:
            self._mark_errored(record, job.snapshot, result)
        elif result.has_gone_back:
            log.warning(
                "the lake table of %s was reverted to %s", job.work.relation.table, LSN(result.position)
            )
        elif result.overtaken:
            log.warning("table %s: %s; trying again", job.work.relation.table, result.overtaken)
        else:
            self._progress.changes += result.changes
            if record is not None:
                self._progress.positions[record.table.path] = LSN(result.position)
            if record is not None and result.relation is not None:
                # The lake table has this relation already. Record it for `pgrepl status` and for the drift
                # sensor.
                relation = Relation.from_json(result.relation)
                self._state_db.record_relation(self._pipeline, relation, job.snapshot, LSN(result.position))
            if job.is_last:
                caught_up = CaughtUpTable(
                    job.snapshot,
                    job.through,
                    job.through,
                    result.version,
                    result.position,
                    result.history_version,
                    result.fingerprint,
                )
            else:
                self._planner.remember(oid, LSN(result.position), job.reach_lsn)
        failed = result.error is not None or result.has_gone_back or bool(result.overtaken)
        self._schedule.finish(oid, caught_up, now if failed else None)
        if caught_up is not None and record is not None and record.state is TableState.CATCHING_UP:
            self._move(record, LSN(result.position))

    def mark_errored(self, record: TableRecord, result: TableResult) -> None:
        """Mark a table as errored whose merge could not be planned. Raises what `take` does."""
        self._mark_errored(record, snapshot_of(record), result)

    def _move(self, record: TableRecord, reached: LSN) -> None:
        if self._state_db.move(self._pipeline, record, TableState.STREAMING, reached=reached):
            log.info("table %s has caught up", record.table)

    def _mark_errored(self, record: TableRecord | None, snapshot: LSN, result: TableResult) -> None:
        """Mark the table as errored, or raise an error that stops the pipeline.

        Does nothing if the table is no longer followed or was copied again: the error may come from the
        replaced copy, and the new one is planned next.
        """
        if record is None:
            return
        now = self._state_db.read_tables(self._pipeline).get(record.table)
        if now is None or not now.state.is_followed or snapshot_of(now) != snapshot:
            return
        error = result.to_error(record.table)
        if result.stops_pipeline:
            if error.trace:
                log.error("table %s stops the pipeline, by %s", record.table, error.trace)
            raise error
        log.error("table %s stops: %s\n  hint: %s", record.table, error.message, error.hint)
        if error.trace:
            log.error("table %s stopped by an unexpected %s", record.table, error.trace)
        lsn = LSN(result.error_lsn) if result.error_lsn else None
        if not self._state_db.mark_errored(self._pipeline, now, error, lsn):
            log.info("another process changed the state of table %s at the same time", record.table)


class MergeScheduler:
    """The merges and consistent points of one run of the applier, in rounds. `changed` is notified when a
    share ends.

    The caller holds `changed` for every call but `needed_above`, `versions_for_points` and `close`.
    """

    def __init__(
        self,
        spark: SparkSession,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        progress: ApplierProgress,
        changed: threading.Condition,
    ) -> None:
        self._pipeline = pipeline
        self._state_db = state_db
        self._progress = progress
        self._changed = changed
        self._records: dict[int, TableRecord] = {}
        self._read_at = -_RECORDS_S
        self._read_ts: datetime | None = None
        self._cadences: dict[TableName, MergePolicy] = {}
        self._begun_ts: dict[int, datetime | None] = {}
        self._ended: list[tuple[Share, list[TableResult], Exception | None]] = []
        points = ConsistentPoints(pipeline.lake_root)
        self._tables = RecordedTables(pipeline, record, points)
        self._planner = CatchUpPlanner(pipeline, record, self._tables)
        self._schedule = TableSchedule(self._cadence, pipeline.batch_bytes)
        self._outcomes = TableOutcomes(pipeline.name, state_db, self._schedule, self._planner, progress)
        self._points = PointWriter(
            points, record.epoch, self._schedule, progress, pipeline.consistent_point_interval_s
        )
        self._runner = MergeTaskPool(spark, self._on_ended)
        self._lanes = MergeSlots(self._runner.slots, jobs_at_once(pipeline.lake_root))
        self._next_report = 0.0
        self._stored = set[int]()
        self._store_at = 0.0
        self.has_news = False

    def add(self, end: BatchEnd, begin: int, items: Iterable[WorkItem]) -> None:
        """Add a batch with the commits after version `begin` of the changelog."""
        self._schedule.add(end, begin, items, time.monotonic())
        self._read_at = -_RECORDS_S
        self.has_news = True

    def step(self, *, may_begin: bool, hurries: bool) -> None:
        """Run one round: take finished merges, plan and start merges, write a point, and update the progress.

        `may_begin`: whether merges may be started. `hurries`: start merges of all waiting changes now, before
        they are due. Raises an error that stops the pipeline.
        """
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
        """Return True if a merge is running, or its result was not taken yet."""
        return self._lanes.is_busy or bool(self._ended)

    @property
    def is_settled(self) -> bool:
        """Return True if all tables have caught up with everything received."""
        return not self.has_news and not self.is_running and self._schedule.is_settled(self._records)

    @property
    def rest_s(self) -> float:
        """Return the seconds until the next round is due, if no batch and no result arrives before."""
        now = time.monotonic()
        if self._lanes.has_ready or self._lagging(now + _RECORDS_S):
            return _RECORDS_S
        turns = self._schedule.turns(now).values() if self._lanes.free else ()
        first = min((turn.at - now for turn in turns), default=LOOK_INTERVAL_S)
        return max(_LEAST_REST_S, min(first, self._points.rest_s(now), LOOK_INTERVAL_S))

    def needed_above(self) -> LSN | None:
        """Return what `Applier.needed_above` does. Any thread may call this."""
        with self._changed:
            known = {
                oid: self._progress.applied_lsn
                for oid, one in self._schedule.caught_up.items()
                if one.through >= self._progress.point_version
            }
        return self._tables.needed_above(self._state_db.read_tables(self._pipeline.name).values(), known)

    def versions_for_points(self) -> dict[str, set[int]]:
        """Return what `Applier.versions_for_points` does. Any thread may call this."""
        with self._changed:
            tables = {oid: record.table for oid, record in self._records.items()}
            return self._schedule.caught_up.versions_for_points(tables)

    def close(self) -> None:
        """Release the threads. Call this only after the last merge has ended."""
        self._runner.close()

    def _on_ended(self, share: Share, results: list[TableResult], failed: Exception | None) -> None:
        with self._changed:
            self._ended.append((share, results, failed))
            self.has_news = True
            self._changed.notify_all()

    def _read_records(self, now: float) -> None:
        """Read the records of the tables to apply changes to. Forget what is known of other tables and of
        older copies.

        Does nothing if the records are recent.
        """
        if now - self._read_at < _RECORDS_S:
            return
        self._read_at, self._read_ts = now, self._state_db.now()
        tables = self._state_db.read_tables(self._pipeline.name).values()
        self._records = {
            record.relation.oid: record
            for record in tables
            if record.state.is_followed and record.relation is not None
        }
        # A table that was stopped and resumed between 2 reads is catching up, so its earlier state is
        # forgotten.
        streaming, catching_up = (
            {oid: snapshot_of(record) for oid, record in self._records.items() if record.state is state}
            for state in (TableState.STREAMING, TableState.CATCHING_UP)
        )
        self._schedule.follow(streaming, catching_up)
        self._store_positions(tables, now)

    def _store_positions(self, tables: Iterable[TableRecord], now: float) -> None:
        """Store in each paused lake table, once, up to which LSN it is complete: a pause may last longer than
        the points that show it.

        A table that a repair has paused is left to it.
        """
        paused = {
            record.relation.oid: record
            for record in tables
            if record.state is TableState.PAUSED and not record.is_paused_by_repair and record.relation
        }
        self._stored &= paused.keys()
        if now < self._store_at:
            return
        for oid in paused.keys() - self._stored - self._schedule.running.keys():
            try:
                self._tables.store_position(paused[oid])
            except PgReplError as error:
                log.warning(
                    "the position of paused table %s could not be stored: %s", paused[oid].table, error
                )
                self._store_at = now + LOOK_INTERVAL_S
            else:
                self._stored.add(oid)

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
        """Forget the states of idle tables whose lake table is no longer as this process left it, and log a
        warning."""

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
        """Plan and add merges for lagging tables. Mark a table as errored if it cannot catch up."""
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

    def _cadence(self, oid: int) -> MergePolicy:
        table = self._records[oid].table
        if table not in self._cadences:
            policy = self._pipeline.options(table).policy
            self._cadences[table] = MergePolicy(
                policy.merge_interval_s,
                policy.max_staleness_s,
                policy.max_write_amplification,
                self._pipeline.consistent_point_bytes,
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
