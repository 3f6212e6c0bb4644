"""Repairs of lake tables that a verification found different.

The table is paused, so that the replication app does not change it. The changes up to the LSN of a
new snapshot of the source are applied. There it has to equal the source, so that the rows that differ are
replaced by the source's. It is then resumed: later changes are applied to the repaired rows.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError, LakeError, SnapshotError, StateError
from airflow_provider_pgrepl.replication.app.operations.tables import pause_tables, resume_tables
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.lake.apply.merge_scheduler import CatchUpPlanner
from airflow_provider_pgrepl.replication.lake.apply.table_records import RecordedTables
from airflow_provider_pgrepl.replication.lake.apply.work_item import BatchEnd
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.table import (
    EXPORTED_APP,
    app_id,
    open_table,
    read_position,
)
from airflow_provider_pgrepl.replication.lake.merge.merge import check_columns
from airflow_provider_pgrepl.replication.lake.schema_evolution.timeline import read_relations
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.lake.verify.comparison import LakeSide, TableComparer
from airflow_provider_pgrepl.replication.lake.verify.repair import TableRepair, pick, refusal_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.state.tables import REPAIRING, TableRecord, TableState
from airflow_provider_pgrepl.replication.values import lake_schema

from .operations import selection
from .verification import TableReport, Verification, VerifyReport, check_layout

log = logging.getLogger(__name__)
_POLL_S = 0.2


def has_version(lake_root: str, table: TableName, version: int) -> bool:
    """Return True if the newest consistent point has this version of a table, or a later one."""
    point = ConsistentPoints(lake_root).latest()
    return point is not None and point.tables.get(str(table), -1) >= version


def resume_interrupted(run: Verification) -> None:
    """Resume the tables that a killed repair left paused.

    No other repair is running, because `run` holds the lock of verifications. Raises StateError.
    """
    left = [table for table, record in run.records.items() if record.is_paused_by_repair]
    if left:
        log.warning("a repair did not end: resuming %s", ", ".join(map(str, left)))
        resume_tables(run.access, left, reason=REPAIRING)
        run.records = run.state_db.read_tables(run.pipeline.name)


def repair_tables(run: Verification, report: VerifyReport) -> None:
    """Repair each table that the report calls different, and replace its entry in the report.

    Raises errors that concern all tables.
    """
    repair = Repair(**vars(run))
    for found in list(report.tables.values()):
        if found.status == "different":
            report.add(repair.repair(found))


@dataclass
class Repair(Verification):
    """A verification that compares paused tables at their newest version, and repairs what differs."""

    _compared: tuple[LSN | None, int | None] = field(default=(None, None), init=False)
    """The position, and the copy, of the lake table that was compared last."""

    def repair(self, found: TableReport) -> TableReport:
        """Repair one table that differs, and return its new report. Raises errors that concern all tables."""
        own, table = VerifyReport(self.pipeline.name), found.table
        # Since the last ones were read, other tables may have been compared for hours.
        self.records = self.state_db.read_tables(self.pipeline.name)
        if table not in self.records:
            return replace(found, not_repaired="it is removed")
        relations = self._comparable([table], own)
        if not relations:
            return replace(found, not_repaired=own.tables[table].parts[0].reason)
        if reason := refusal_of(relations[0], self._options(table)):
            return replace(found, not_repaired=reason)
        try:
            with self._paused(table):
                self.compare_all(relations, own)
        except StateError as error:
            return replace(found, not_repaired=error.message)
        repaired = own.tables[table]
        if repaired.status == "not_compared":
            return replace(found, not_repaired=repaired.parts[0].reason)
        if repaired.repaired_version is not None:
            self._await_point(table, repaired.repaired_version)
        return repaired

    def _await_point(self, table: TableName, version: int) -> None:
        """Wait until the replication app, if one runs, has recorded a point with the repaired rows.

        Readers as of a position of the source begin at a consistent point, and add changes from the
        changelog, which does not know the repair.
        """
        deadline = time.monotonic() + self.timeout_s
        root, name = self.pipeline.lake_root, self.pipeline.name
        while self.state_db.is_locked(name, "replicate") and not has_version(root, table, version):
            if time.monotonic() > deadline:
                log.warning("%s: no consistent point has the repaired rows yet", table)
                return
            time.sleep(_POLL_S)

    @contextmanager
    def _paused(self, table: TableName) -> Iterator[None]:
        """Keep the replication app from applying changes to the table during the block.

        A table that an operator pauses meanwhile stays paused. Raises StateError if the table cannot be
        paused, or if an operator has paused it, BusyError if the app does not end its merges.
        """
        name, deadline = self.pipeline.name, selection.Deadline(self.timeout_s)
        since = self.state_db.now()
        # Under this lock: a snapshot that begins to copy the table has set its state before, or sees that it
        # is repaired.
        with self.state_db.locked(name, "publication", self.timeout_s):
            pause_tables(self.access, [table], reason=REPAIRING)
        if not self._record(table).is_paused_by_repair:
            raise StateError(
                f"{table}: was paused meanwhile, and stays paused", "resume it, and run the repair again"
            )
        try:
            # Make a batch begin that knows the new state, even if there are no changes.
            writer.mark(changelog_uri(self.pipeline.lake_root))
            selection.wait_until_released(self.state_db, name, since, deadline)
            # The lock was taken if no app ran. One may start now: it finds the table paused.
            self.state_db.unlock(name, "replicate")
            yield
        finally:
            self.state_db.unlock(name, "replicate")
            if self._record(table).is_paused_by_repair:
                resume_tables(self.access, [table], reason=REPAIRING)

    def _record(self, table: TableName) -> TableRecord:
        record = self.state_db.read_tables(self.pipeline.name).get(table)
        if record is None:
            raise StateError(f"{table}: was removed while it was repaired")
        return record

    @property
    def _app(self) -> str:
        return app_id(self.pipeline.name, self.epoch.epoch)

    def _plan_now(self, table: TableName) -> TablePlan:
        """Return a plan of the newest version. No consistent point names a paused table, so none is asked."""
        opened = open_table(f"{self.pipeline.lake_root}/{table.path}")
        relations = read_relations(opened)
        index = RelationIndex(relations_uri(self.pipeline.lake_root))
        record = index.find_version(relations[0]) if relations and relations[0] == relations[1] else None
        built = None if record is None else record.catalog
        position = read_position(opened, self._app) or LSN(0)
        version = TableVersion(table, opened.table_uri.rstrip("/"), int(opened.version()))
        schema = pa.schema(opened.schema().to_arrow())
        return TablePlan(table, version, position, built, schema)

    def _lake_at(self, relation: Relation, position: LSN) -> LakeSide:
        """Bring the table forward to `position`, and return its newest version."""
        options = self._options(relation.table)
        self.await_changelog(position)
        self._bring_forward(relation.table, position)
        plan = self._plan_now(relation.table)
        check_layout(plan.relation, relation, options)
        table = plan.version.open()
        check_columns(table, lake_schema(relation, options), relation)
        self._compared = self._marks(table)
        if plan.lsn > position:
            raise _past(relation.table, plan.lsn, position)
        return LakeSide(self.session.get(), plan)

    def _bring_forward(self, name: TableName, position: LSN) -> None:
        """Apply the table's changes up to `position`. Raises the error with which the table would stop,
        SnapshotError if the table is past the position, and StateError if it is not paused any more."""
        record = self._record(name)
        if record.state is not TableState.PAUSED:
            raise StateError(f"{name}: is {record.state} now, and no longer paused for the repair")
        assert record.relation is not None
        oid, points = record.relation.oid, ConsistentPoints(self.pipeline.lake_root)
        planner = CatchUpPlanner(self.pipeline, self.epoch, RecordedTables(self.pipeline, self.epoch, points))
        is_last = False
        while not is_last:
            refused, jobs = planner.plan({oid: record}, BatchEnd(0, position, None))
            if refused:
                raise refused[0].to_error(name)
            (job,) = jobs
            if job.work.position > position:
                raise _past(name, LSN(job.work.position), position)
            result = job.run()
            if result.error is not None:
                raise result.to_error(name)
            if result.has_gone_back or result.overtaken:
                raise LakeError(f"{name}: {result.overtaken or 'the lake table was reverted meanwhile'}")
            planner.remember(oid, LSN(result.position), job.reach_lsn)
            is_last = job.is_last

    def _concluded(self, report: TableReport, comparer: TableComparer, relation: Relation) -> TableReport:
        if report.status != "different":
            return report
        if reason := refusal_of(relation, self._options(relation.table)):
            return replace(report, not_repaired=reason)
        if report.comparison is None or report.comparison.listed is None:
            return replace(report, not_repaired="more rows differ than are compared one by one")
        try:
            return self._repaired(report, comparer, relation)
        except FencedError as error:
            raise SnapshotError(f"{relation.table}: {error.message}") from error

    def _repaired(self, report: TableReport, comparer: TableComparer, relation: Relation) -> TableReport:
        """Replace the differing rows, compare the lake table with the source's sums again, and return the
        report."""
        assert report.comparison is not None
        listed, position = report.comparison.listed, report.verified_through
        assert listed is not None
        assert position is not None
        assert report.verified_at is not None
        before = LakeSide(self.session.get(), self._plan_now(relation.table))
        table = self._opened(before)
        missing = pick(comparer.source, comparer.shape, listed.missing)
        extra = pick(before, comparer.shape, listed.extra)
        options = self._options(relation.table)
        repair = TableRepair(relation, options, self._app, position, report.verified_at)
        repair.commit(table, missing, extra)
        after = LakeSide(self.session.get(), self._plan_now(relation.table))
        left = listed.at_source.differing(after.collect(listed.whole))
        if len(left):
            reason = f"after the repair, {len(left)} ranges still differ: another program may write the table"
            return replace(report, not_repaired=reason)
        log.warning("table %s: version %d repairs its rows", relation.table, table.version())
        return replace(report, status="repaired", repaired_version=int(table.version()))

    def _opened(self, lake: LakeSide) -> DeltaTable:
        """Open the version to repair. Raises SnapshotError if it has other changes, or another copy, than the
        compared one: the rows that were missing may be in it now."""
        table = lake.plan.version.open()
        if self._marks(table) != self._compared:
            raise SnapshotError(f"{lake.plan.table}: the lake table was written by another process")
        return table

    def _marks(self, table: DeltaTable) -> tuple[LSN | None, int | None]:
        return read_position(table, self._app), app_version(table, EXPORTED_APP)


def _past(table: TableName, reached: LSN, position: LSN) -> SnapshotError:
    return SnapshotError(
        f"{table}: changes up to {reached} were applied before the table was compared at {position}",
        "run the verification again",
    )
