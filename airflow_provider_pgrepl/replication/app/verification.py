"""One run of a verification: its snapshots of the source, the tables that it compares, and its report for
people and for programs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from airflow_provider_pgrepl.errors import (
    LakeError,
    LakeUnavailableError,
    PgReplError,
    SnapshotError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import (
    check_timeline,
    open_changelog,
    read_durable_lsn,
)
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import CopyReport
from airflow_provider_pgrepl.replication.lake.snapshot.table_queue import is_of_one_table
from airflow_provider_pgrepl.replication.lake.time_travel.moment import find_moment
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Planner, TablePlan
from airflow_provider_pgrepl.replication.lake.verify.buckets import Buckets, RowShape
from airflow_provider_pgrepl.replication.lake.verify.comparison import (
    LakeSide,
    NotCompared,
    SourceReading,
    SourceSide,
    TableComparer,
    TableComparison,
    counting,
    sample_of,
    shape_of,
    uncompared_parts,
)
from airflow_provider_pgrepl.replication.lake.verify.text_check import (
    TextReading,
    parts_without_text,
    text_shape_of,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, copied_options
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.source.copy import snapshot_holder
from airflow_provider_pgrepl.replication.source.preflight.selection import select_tables
from airflow_provider_pgrepl.replication.source.slot import temporary_name
from airflow_provider_pgrepl.replication.source.slot_creation import ExportedSnapshot, export_snapshot
from airflow_provider_pgrepl.replication.spark.session import LazySession
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.values import copied_part, typed_columns

from .access import Access
from .table_watch import recorded_names
from .tables import Records, followed_names, read_selected, requested_of

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.source.connection import Connection

WHOLE = "table"
Status = Literal["equal", "sample_equal", "repaired", "different", "not_compared"]
log = logging.getLogger(__name__)
_ATTEMPTS = 3
_POLL_S = 0.1
_ASK_EVERY_S = 5.0
"""Repeated, because an app that starts does not see what was asked before."""


@dataclass(frozen=True)
class TableReport:
    """The result for one table.

    `parts`: what was not compared, and why. `verified_through`: the last LSN that the compared rows include.
    `verified_at`: when the source's snapshot was exported. `repaired_version`: the version of the lake table
    that repaired the differences. `not_repaired`: why a repair was refused or failed; empty without one.
    """

    table: TableName
    status: Status
    parts: Sequence[NotCompared] = ()
    comparison: TableComparison | None = None
    verified_through: LSN | None = None
    verified_at: datetime | None = None
    repaired_version: int | None = None
    not_repaired: str = ""

    @classmethod
    def of(
        cls,
        table: TableName,
        comparison: TableComparison,
        parts: Sequence[NotCompared],
        through: LSN,
        at: datetime,
    ) -> TableReport:
        return cls(table, comparison.status, parts, comparison, through, at)

    @classmethod
    def not_compared(cls, table: TableName, reason: str) -> TableReport:
        return cls(table, "not_compared", (NotCompared(WHOLE, reason),))

    def to_json(self) -> dict[str, Any]:
        """Return the report for programs. No value of a row is in it but the keys that were asked for."""
        found: dict[str, Any] = {
            "table": str(self.table),
            "status": self.status,
            "not_compared": [{"part": part.part, "reason": part.reason} for part in self.parts],
        }
        if self.comparison is None:
            return found
        compared, differences = self.comparison, self.comparison.differences
        found |= {
            "verified_through": str(self.verified_through),
            "verified_at": None if self.verified_at is None else self.verified_at.isoformat(),
            **_counts(compared),
            "missing": differences.missing,
            "extra": differences.extra,
            "changed": differences.changed,
            "different_columns": dict(sorted(differences.columns.items())),
        }
        if self.repaired_version is not None:
            found["repaired_version"] = self.repaired_version
        if self.not_repaired:
            found["not_repaired"] = self.not_repaired
        for name in ("missing_keys", "extra_keys", "changed_keys"):
            if keys := getattr(differences, name):
                found[name] = keys
        return found

    def to_text(self) -> str:
        """Return the report for people."""
        return "\n".join(self._lines())

    def _lines(self) -> list[str]:
        if self.comparison is None:
            return [f"{self.table}: not compared: {self.parts[0].reason}"]
        compared, differences = self.comparison, self.comparison.differences
        if self.status == "sample_equal":
            head = f"{self.table}: sample equal at {self.verified_through}: {compared.source_rows:,} rows"
        elif compared.sampled_rows is not None:
            head = (
                f"{self.table}: different at {self.verified_through}: of {compared.sampled_rows:,} rows of"
                f" the source, {differences.missing:,} missing, {differences.changed:,} changed"
            )
        elif self.status == "equal":
            head = f"{self.table}: equal through {self.verified_through}: {compared.source_rows:,} rows"
        elif self.status == "repaired":
            head = (
                f"{self.table}: repaired through {self.verified_through}, in version {self.repaired_version}:"
                f" {differences.missing:,} missing, {differences.extra:,} extra, {differences.changed:,}"
                f" changed; compared again, equal: {compared.source_rows:,} rows"
            )
        else:
            head = (
                f"{self.table}: different at {self.verified_through}: {compared.source_rows:,} rows at the"
                f" source, {compared.lake_rows:,} in the lake; {differences.missing:,} missing,"
                f" {differences.extra:,} extra, {differences.changed:,} changed"
            )
        lines = [head]
        if self.not_repaired:
            lines.append(f"  not repaired: {self.not_repaired}")
        if left := compared.differing_ranges - compared.listed_ranges:
            lines.append(f"  {left:,} differing ranges have more rows than are compared one by one")
        lines += [f"  column {name}: {rows:,} rows" for name, rows in sorted(differences.columns.items())]
        for kind in ("missing", "extra", "changed"):
            lines += [f"  {kind}: {_key(key)}" for key in getattr(differences, f"{kind}_keys")]
        return lines + [f"  not compared: {part.part}: {part.reason}" for part in self.parts]


def _counts(compared: TableComparison) -> dict[str, int]:
    if compared.sampled_rows is not None:
        return {"sampled_rows": compared.sampled_rows}
    return {
        "source_rows": compared.source_rows,
        "lake_rows": compared.lake_rows,
        "ranges": compared.ranges,
        "differing_ranges": compared.differing_ranges,
        "listed_ranges": compared.listed_ranges,
    }


def _key(key: Sequence[str | None]) -> str:
    return ", ".join("NULL" if value is None else value for value in key)


@dataclass
class VerifyReport:
    """The results of one run, by table."""

    pipeline: str
    tables: dict[TableName, TableReport] = field(default_factory=dict)

    def add(self, table: TableReport) -> None:
        self.tables[table.table] = table

    def to_json(self) -> dict[str, Any]:
        tables = [self.tables[table].to_json() for table in sorted(self.tables)]
        return {"pipeline": self.pipeline, "tables": tables}

    def to_text(self) -> str:
        return "\n".join(self.tables[table].to_text() for table in sorted(self.tables))


@dataclass
class Verification:
    """One run: its connections, and the tables that it compares.

    `percent`: of the source's pages that are compared, None for all. `by_text`: compare the texts of values.
    """

    access: Access
    source: Connection
    state_db: StateDatabase
    epoch: EpochRecord
    records: Records
    session: LazySession
    timeout_s: float
    shows_keys: bool
    percent: float | None = None
    by_text: bool = False

    @property
    def pipeline(self) -> Pipeline:
        return self.access.pipeline

    def run(self, tables: Collection[TableName]) -> VerifyReport:
        """Compare these tables. Raises errors that concern all of them."""
        report = VerifyReport(self.pipeline.name)
        self.compare_all(self._comparable(tables, report), report)
        return report

    def compare_all(self, left: list[Relation], report: VerifyReport) -> None:
        """Compare these tables, and add them to the report. Raises errors that concern all of them."""
        for attempt in range(1, _ATTEMPTS + 1):
            if not left:
                break
            try:
                left = self._compare_at_one_snapshot(left, report)
            except SnapshotError as error:
                if attempt == _ATTEMPTS:
                    raise
                log.warning("comparing under another snapshot: %s", error.message)
                left = [found for found in left if found.table not in report.tables]
        for relation in left:
            reason = "statements of other sessions needed its lock again and again"
            report.add(TableReport.not_compared(relation.table, reason))

    def _comparable(self, tables: Collection[TableName], report: VerifyReport) -> list[Relation]:
        """Return the tables that can be compared, and add the others to the report."""
        known = recorded_names(
            self.source,
            self.pipeline,
            self.epoch,
            self.records,
            self.state_db.read_pipeline(self.pipeline.name),
            read_selected(self.state_db, self.pipeline),
        )
        requested = requested_of(self.records, followed_names(self.pipeline), known)
        selected = select_tables(self.source, self.pipeline, requested)
        relations = {relation.table: relation for relation in selected.relations}
        found = []
        for table in sorted(tables):
            record, problem = self.records[table], selected.problems.get(table)
            if not record.state.is_followed:
                because = f": {record.reason}" if record.is_paused_by_repair else ""
                report.add(TableReport.not_compared(table, f"it is {record.state}{because}"))
            elif problem is not None or table not in relations:
                reason = problem.message if problem is not None else "the source no longer has it"
                report.add(TableReport.not_compared(table, reason))
            else:
                found.append(relations[table])
        return found

    def _compare_at_one_snapshot(self, relations: list[Relation], report: VerifyReport) -> list[Relation]:
        """Compare tables at a new snapshot. Return those that gave way to a statement of the source."""
        exported = export_snapshot(
            self.access.dsn,
            temporary_name(self.source),
            timeout_s=self.pipeline.slot_timeout_s,
            primary_dsn=self.access.primary_dsn,
        )
        with exported:
            keeper = snapshot_holder.keep_for(self.pipeline, self.access.dsn, exported, relations)
        gave_way = []
        with keeper, CopyReport(None, self.pipeline.name, len(relations)) as progress:
            sessions = keeper.sessions(1).ranges
            for relation in keeper.relations:
                try:
                    report.add(self._compare(keeper, relation, exported, sessions, progress))
                except TableSnapshotError as error:
                    log.warning("%s is compared again: %s", relation.table, error.message)
                    gave_way.append(relation)
        named = {relation.table for relation in gave_way}
        return [relation for relation in relations if relation.table in named]

    def _compare(
        self,
        keeper: snapshot_holder.SnapshotHolder,
        relation: Relation,
        exported: ExportedSnapshot,
        sessions: int,
        progress: CopyReport,
    ) -> TableReport:
        started = time.monotonic()
        try:
            found = self._compare_table(keeper, relation, exported, sessions, progress)
        except (LakeUnavailableError, TableSnapshotError):
            raise
        except PgReplError as error:
            if not (isinstance(error, LakeError) or is_of_one_table(error)):
                raise
            reason = f"{error.message}; {error.hint}" if error.hint else error.message
            return TableReport.not_compared(relation.table, reason)
        if (
            self._compares_all_columns(relation)
            and found.status in ("equal", "repaired")
            and found.verified_through is not None
            and found.verified_at is not None
        ):
            record = self.records[relation.table]
            self.state_db.record_verified(
                self.pipeline.name, record, found.verified_through, found.verified_at
            )
        seconds = time.monotonic() - started
        log.info("compared %s: %s, after %.1f s", relation.table, found.status, seconds)
        return found

    def _compare_table(
        self,
        keeper: snapshot_holder.SnapshotHolder,
        relation: Relation,
        exported: ExportedSnapshot,
        sessions: int,
        progress: CopyReport,
    ) -> TableReport:
        options = self._options(relation.table)
        # The shape of the lake table as it is now: its left out and dropped columns are not in the catalog.
        now = self._plan_now(relation.table)
        held = now.relation or relation
        relation = without_excluded_defaults(relation, self.pipeline)
        relation = replace(relation, ignored=held.ignored, dropped=held.dropped)
        # The snapshot does not include a commit at its consistent point itself.
        position = LSN(exported.consistent_point - 1)
        with keeper.hold(next(known for known in keeper.relations if known.oid == relation.oid)) as holder:
            copied = copied_part(relation, options)
            spark = self.session.get()
            rows = LakeSide(spark, now).row_count
            sample = None if self.percent is None else sample_of(self.percent, rows)
            size = self.pipeline.snapshot_range_bytes
            ranges = holder.plan(copied, size, sample, selects=self.by_text)
            read = (spark, self.access.dsn, holder, relation, options, ranges, sessions, self._reading)
            with progress.copying(relation.table, ranges) as copy:
                comparer = TableComparer(
                    SourceSide(*read, finished=counting(copy)),
                    partial(self._lake_at, relation, position),
                    self._shape_of(relation, options),
                    Buckets.for_rows(rows),
                    self.shows_keys,
                )
                compared = comparer.compare() if sample is None else comparer.compare_sample()
            parts = uncompared_parts(relation, options, sample)
            parts += parts_without_text(relation, options) if self.by_text else []
            report = TableReport.of(relation.table, compared, parts, position, exported.exported_at)
            return self._concluded(report, comparer, relation)

    def _compares_all_columns(self, relation: Relation) -> bool:
        return not (self.by_text and parts_without_text(relation, self._options(relation.table)))

    @property
    def _reading(self) -> type[SourceReading]:
        return TextReading if self.by_text else SourceReading

    def _shape_of(self, relation: Relation, options: TableOptions) -> RowShape:
        return text_shape_of(self.source, relation, options) if self.by_text else shape_of(relation, options)

    def _plan_now(self, table: TableName) -> TablePlan:
        return self._planner().plan(table)

    def _concluded(
        self,
        report: TableReport,
        comparer: TableComparer,  # noqa: ARG002 - a repair reads the differing rows through it
        relation: Relation,  # noqa: ARG002 - of a repair, too
    ) -> TableReport:
        """Return the report of a compared table while the source's snapshot is still open."""
        return report

    def _lake_at(self, relation: Relation, position: LSN) -> LakeSide:
        """Return the lake table as of the snapshot, once the changelog has reached it."""
        self.await_changelog(position)
        plan = self._planner(position).plan(relation.table)
        if plan.unverified is not None:
            raise LakeError(str(plan.unverified))
        options = self._options(relation.table)
        check_layout(plan.relation, relation, options)
        lake = LakeSide(self.session.get(), plan)
        lake.check_comparable()
        return lake

    def _planner(self, lsn: LSN | None = None) -> Planner:
        points = ConsistentPoints(self.pipeline.lake_root)
        moment = find_moment(self.pipeline.lake_root, points, lsn, epoch=self.epoch.epoch)
        return Planner(self.pipeline, moment, points, newest=True, copied_with=self._options)

    def _options(self, table: TableName) -> TableOptions:
        """Return the settings with which a table was copied."""
        return copied_options(self.pipeline, self.records[table].config, table)

    def await_changelog(self, position: LSN) -> None:
        """Wait until the changelog includes a position. Raises LakeUnavailableError after `timeout_s`.

        Raises SnapshotError if the changelog continues from a promoted standby since the source was read.
        """
        uri, began, asked = changelog_uri(self.pipeline.lake_root), time.monotonic(), float("-inf")
        while (durable := read_durable_lsn(changelog := open_changelog(uri))) <= position:
            now = time.monotonic()
            if now > asked + _ASK_EVERY_S:
                if asked < began and not self.state_db.is_locked(self.pipeline.name, "replicate"):
                    log.warning(
                        "no replication app runs: start it, so that the changelog reaches %s", position
                    )
                asked = now
                _ask(uri, position)
            if now > began + self.timeout_s:
                raise LakeUnavailableError(
                    f"the changelog is durable up to {durable}, and the source was read at {position}",
                    "start the replication app, or give it more time with --timeout",
                )
            time.sleep(_POLL_S)
        check_timeline(changelog, self.epoch)


def _ask(uri: str, position: LSN) -> None:
    """Ask the replication app to make the changelog durable past a position, if this process may
    write there. Of an idle source it does so every two minutes on its own."""
    try:
        writer.mark(uri, wanted_lsn=position)
    except PgReplError as error:
        log.info("the replication app is not asked to advance the changelog: %s", error.message)


def check_layout(held: Relation | None, relation: Relation, options: TableOptions) -> None:
    """Raise LakeError if the relation of a lake table is not known or has other columns than the source."""
    if held is None or _layout(held, options) != _layout(relation, options):
        raise LakeError(
            f"{relation.table}: the source's table has other columns than the lake table",
            "if it was altered recently, verify it again when the replication app has caught up; otherwise"
            " run pgrepl drift FILE.json --no-mark-errored",
        )


def _layout(relation: Relation, options: TableOptions) -> list[tuple[int, str, str, bool]]:
    """Return what identifies the columns of the lake table of a relation."""
    return [
        (typed.column.attnum, typed.name, str(typed.lake_type), typed.index is None)
        for typed in typed_columns(relation, options)
    ]
