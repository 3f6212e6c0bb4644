"""Copies tables at one snapshot, in ranges that Spark tasks copy. Each table is committed once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from functools import cached_property, partial
from typing import TYPE_CHECKING

from deltalake import DeltaTable

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import check_timeline, open_changelog
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.bound_rules import BoundRules
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.commit import commented, commit_comments
from airflow_provider_pgrepl.replication.lake.delta.ownership import check_replaceable
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import (
    commit_snapshot,
    warn_of_rows_of_lake,
)
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.history.apply import end_all_versions
from airflow_provider_pgrepl.replication.lake.history.table import (
    check_not_hidden,
    history_key,
    history_path,
    is_history,
    prepare_history,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import Comments, read_comments
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopiedRange, CopyRange
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import (
    SnapshotHolder,
    TableSnapshotHolder,
)
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.slot_creation import ExportedSnapshot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.replication.values import copied_part, lake_schema

from .copy_report import CopyReport, TableCopy
from .kept_ranges import KeptRanges
from .range_copy import CopyJob, RangeCopies
from .table_queue import AT_ONCE, CopyResult, copy_tables

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


class SnapshotCopy:
    """Copies the keeper's tables, which are in state `snapshotting`. If a table fails, the others are still
    copied."""

    def __init__(
        self,
        spark: SparkSession,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        keeper: SnapshotHolder,
        exported: ExportedSnapshot,
    ) -> None:
        self._spark = spark
        self._dsn = dsn
        self._pipeline = pipeline
        self._state_db = state_db
        self._record = record
        self._keeper = keeper
        self._exported = exported
        # The snapshot does not include a commit at the consistent point itself.
        self._position = LSN(exported.consistent_point - 1)
        self._index = RelationIndex(relations_uri(pipeline.lake_root))
        self._place: EffectiveFrom | None = None
        self._rules = BoundRules(pipeline, self._index.records, lambda: set(self._index.relation_ids()))
        self._index_lock = threading.Lock()
        self._versions: dict[str, int] = {}
        self._measured: dict[TableName, tuple[int, float]] = {}
        self._comments: dict[TableName, Comments] = {}
        self._ranges_at_once = 1

    def run(self) -> CopyResult:
        """Copy, commit and record each table. Raises an error that stops more than one table, except for a
        lost snapshot, after the running copies have ended and been recorded."""
        found = (without_excluded_defaults(known, self._pipeline) for known in self._keeper.relations)
        relations = {relation.table: relation for relation in found}
        try:
            self._read_catalog(relations.values())
            sessions = self._keeper.sessions(AT_ONCE)
        except errors.SnapshotError as error:
            return CopyResult(lost=error)
        self._ranges_at_once = sessions.ranges
        with CopyReport(self._state_db, self._pipeline.name, len(relations)) as report:
            return copy_tables(
                list(relations),
                lambda table: self._copy(relations[table], report),
                at_once=sessions.tables,
                finished=lambda table, rows: self._finish(relations[table], rows),
                failed=lambda table, error: self._mark_errored(relations[table], error),
            )

    def _read_catalog(self, relations: Iterable[Relation]) -> None:
        """Read the event trigger and the tables' comments. Raises SnapshotError if the snapshot is lost."""
        watching = self._keeper.read(lambda source: trigger.read_watching(source, self._pipeline))
        self._place = None if watching is None else EffectiveFrom(self._position, watching)
        for relation in relations:
            read = partial(read_comments, table=relation.table, oid=relation.oid)
            self._comments[relation.table] = self._keeper.read(read)

    def _finish(self, relation: Relation, rows: int) -> None:
        size, seconds = self._measured[relation.table]
        self._state_db.record_snapshot(
            self._pipeline.name,
            relation,
            self._position,
            rows,
            self._pipeline.to_json(),
            bytes=size,
            seconds=seconds,
        )
        self._state_db.set_state(
            self._pipeline.name, relation.table, TableState.CATCHING_UP, reached=self._position
        )

    def write_point(self) -> None:
        """Write a consistent point of the copied tables: the first point in time of an epoch that can be
        read.

        Only for the snapshot that begins the epoch. The replication app writes all later points, and may have
        begun to. Does nothing if it runs, or has written a point of this epoch.
        """
        if not self._versions:
            return
        try:
            # Only one process may append points, so keep the app from starting meanwhile.
            with self._state_db.locked(self._pipeline.name, "replicate", 0):
                self._write_first_point()
        except errors.BusyError:
            log.info("the replication app runs: it writes the consistent points of this epoch")

    def _write_first_point(self) -> None:
        position, epoch, exported_at = self._moment
        points = ConsistentPoints(self._pipeline.lake_root)
        latest = points.latest()
        if latest is not None and latest.epoch == epoch:
            return
        positions = {key: int(position) for key in self._versions if not is_history(key)}
        points.append(ConsistentPoint(epoch, position, exported_at, self._versions, positions))

    @property
    def _moment(self) -> tuple[LSN, Epoch, datetime]:
        """Position, epoch and export time of the copied rows."""
        return self._position, self._record.epoch, self._exported.exported_at

    def _plan(
        self, keeper: TableSnapshotHolder, relation: Relation, copied: Sequence[CopiedRange] = ()
    ) -> list[CopyRange]:
        """Return the ranges to copy. `copied`: those of an earlier copy.

        Raises TableError if settings do not fit the locked table, which may have been altered since they were
        checked.
        """
        with self._index_lock:
            problems = list(self._rules.problems(relation))
        if problems:
            raise errors.TableError("\n".join(f"{relation.table}: {problem}" for problem in problems))
        options = self._pipeline.options(relation.table)
        size = self._pipeline.snapshot_range_bytes
        return keeper.plan(copied_part(relation, options), size, copied=copied)

    def _copy(self, relation: Relation, report: CopyReport) -> int:
        started = time.monotonic()
        # Check before the first file is written: it would remain in a folder that this pipeline does not own.
        self._check_replaceable(relation.table)
        kept = self._kept_ranges(relation)
        with self._keeper.hold(relation) as keeper:
            ranges = self._plan(keeper, relation, kept.find(keeper.xmin()))
            if self._pipeline.options(relation.table).policy.history:
                prepare_history(relation, self._pipeline, *self._moment)
            with report.copying(relation.table, ranges, kept) as copy:
                files = self._copy_ranges(keeper, relation, ranges, copy, kept)
        kept.forget(files)
        rows = self._commit(relation, files)
        seconds = self._measure(relation.table, sum(file.size for file in files), started)
        log.info("copied %s: %d rows in %.1f s", relation.table, rows, seconds)
        return rows

    def _kept_ranges(self, relation: Relation) -> KeptRanges:
        options = self._pipeline.options(relation.table)
        return KeptRanges(self._pipeline.lake_root, relation, options, self._record, self._position)

    def _measure(self, table: TableName, size: int, started: float) -> float:
        """Keep the bytes written for a table and the duration, for its record. Return the duration."""
        seconds = time.monotonic() - started
        self._measured[table] = size, round(seconds, 3)
        return seconds

    def _check_replaceable(self, table: TableName) -> None:
        lake_root, name = self._pipeline.lake_root, self._pipeline.name
        paths = [table.path, *([history_path(table)] if self._pipeline.options(table).policy.history else [])]
        for path in paths:
            check_replaceable(f"{lake_root}/{path}", name, lambda: table in self._copied_before)
        if len(paths) > 1 and history_key(table) in self._named_before:
            check_not_hidden(lake_root, table)

    @cached_property
    def _copied_before(self) -> set[TableName]:
        """The tables that were copied before this run, according to the state database or consistent
        points."""
        records = self._state_db.read_tables(self._pipeline.name)
        known = {table for table, record in records.items() if record.position_lsn is not None}
        return known | {TableName.parse(key) for key in self._named_before if not is_history(key)}

    @cached_property
    def _named_before(self) -> frozenset[str]:
        """The keys of tables and histories that kept consistent points name."""
        return frozenset(ConsistentPoints(self._pipeline.lake_root).kept_versions())

    def _copy_ranges(
        self,
        keeper: TableSnapshotHolder,
        relation: Relation,
        ranges: list[CopyRange],
        copy: TableCopy,
        kept: KeptRanges,
    ) -> list[WrittenFile]:
        job = CopyJob(
            self._dsn,
            keeper.snapshot,
            relation,
            self._pipeline.options(relation.table),
            self._pipeline.lake_root,
            self._position,
            self._exported.exported_at,
        )
        copies = RangeCopies(self._spark, job, keeper, self._ranges_at_once, copy.finish)
        files = copies.run(ranges, kept)
        if any(part.copied is not None for part in ranges):
            log.info(
                "%s: %d of %d ranges are those of an earlier copy that has not ended",
                *(relation.table, copy.unchanged, len(ranges)),
            )
        return files

    def _commit(self, relation: Relation, files: list[WrittenFile]) -> int:
        options = self._pipeline.options(relation.table)
        version = self._add_to_index(relation)
        if options.policy.history:
            self._versions[history_key(relation.table)] = end_all_versions(
                relation, self._pipeline, *self._moment
            )
        uri = self._uri(relation.table)
        warn_of_rows_of_lake(uri, relation.table, rows_of_lake(self._pipeline, relation.table))
        self._check_timeline()
        commit_snapshot(
            uri,
            commented(lake_schema(relation, options), self._comments[relation.table].columns),
            files,
            self._position,
            self._pipeline.name,
            self._record.epoch,
            self._exported.exported_at,
            version,
        )
        self._conclude(relation.table, open_table(uri))
        return sum(file.rows for file in files)

    def _check_timeline(self) -> None:
        """Raise SnapshotError if the changelog continues from another server than the rows were read from."""
        check_timeline(open_changelog(changelog_uri(self._pipeline.lake_root)), self._record)

    def _uri(self, table: TableName) -> str:
        return f"{self._pipeline.lake_root}/{table.path}"

    @property
    def _app(self) -> str:
        return app_id(self._pipeline.name, self._record.epoch)

    def _add_to_index(self, relation: Relation) -> int:
        """Add the relation to the index, and return its version. Call it before a commit names it."""
        record = RelationRecord.of_catalog(relation)
        with self._index_lock:
            self._index.add(self._record.epoch, record, self._place)
        return record.version

    def _conclude(self, name: TableName, table: DeltaTable) -> None:
        """Set the comments of a table that has the snapshot's rows, and keep its version for the point."""
        commit_comments(table, self._app, self._position, self._comments[name])
        self._versions[str(name)] = int(table.version())

    def _mark_errored(self, relation: Relation, error: PgReplError) -> None:
        log.error("%s: %s", relation.table, error)
        if error.trace:
            log.error("%s: stopped by an unexpected %s", relation.table, error.trace)
        self._state_db.set_state(
            self._pipeline.name,
            relation.table,
            TableState.ERRORED,
            error=type(error).__name__,
            reason=error.message,
            hint=error.hint or f"fix the cause, then {errors.resnapshot(relation.table)}",
            remedy=error.remedy,
            lsn=self._position,
            trace=error.trace,
        )


def rows_of_lake(pipeline: Pipeline, table: TableName) -> list[str]:
    """Return the settings by which the lake may have rows of a table that the source has deleted."""
    policy = pipeline.options(table).policy
    found = {
        "deletes: soft": policy.deletes == "soft",
        "truncate: ignore": policy.truncate == "ignore",
        "insert_only": table in map(TableName.parse, pipeline.insert_only),
    }
    return [setting for setting, applies in found.items() if applies]
