"""Maintenance on request: the steps of the replication app, repeated until nothing is left to do.

It may run while that app runs. Then it leaves the changelog's hours and files to the app, because only the
app knows up to which position they have been read. It also leaves the files and log entries of lake tables to
the app, because only the app knows which versions its next consistent point may name. It holds a lock of its
own, because no lake table may be dropped while it is compacted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from airflow_provider_pgrepl.errors import LakeError, PgReplError
from airflow_provider_pgrepl.replication.app import evidence, process
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.epoch import begun_epoch, refuse_without_lake
from airflow_provider_pgrepl.replication.app.needed_changes import (
    Retention,
    retention,
    retention_lsn,
    unchecked_above,
)
from airflow_provider_pgrepl.replication.app.process import MAINTENANCE_LIMIT_S
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import compact_closed_hours
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.apply.table_records import RecordedTables
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.files.compaction import Compaction, compact_thoroughly
from airflow_provider_pgrepl.replication.lake.history.table import history_key, history_uri
from airflow_provider_pgrepl.replication.lake.maintenance import (
    Maintenance,
    MaintenanceResult,
    VersionsForPoints,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes, show_count
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from .selection import choose, recorded

_COPIED = {state for state in TableState if state.needs_changes or state is TableState.ERRORED}
_COMPACTION_BYTES = 256 << 20
log = logging.getLogger(__name__)
Wait = Callable[[float], bool]
"""Waits for a number of seconds, or until the process is asked to end. Returns True if it was asked."""


@dataclass(frozen=True)
class MaintainedTable:
    """The result for a lake table, or a history, by its name in consistent points."""

    table: str
    compaction: Compaction | None = None
    failed: PgReplError | None = None

    @property
    def is_busy(self) -> bool:
        """Return True if the table's writer committed first in every attempt."""
        return self.compaction is not None and self.compaction.is_busy

    def to_text(self) -> str:
        """Return the result as one line, or as the error with its hint."""
        if self.compaction is None:
            return f"{self.table}: failed: {self.failed}"
        before, after = self.compaction.before, self.compaction.after
        now = f", now {after.files} of {show_bytes(after.bytes)}" if after != before else ""
        why = ""
        if self.compaction.is_busy:
            why = "; too busy: its writer committed first each time. Run it again in a quieter hour"
        elif self.compaction.is_left:
            why = "; not finished: run the command again, with a larger --limit-s"
        return f"{self.table}: {show_count(before.files, 'file')} of {show_bytes(before.bytes)}{now}{why}"

    def to_report(self) -> dict[str, object]:
        """Return the result in JSON types."""
        if self.compaction is None:
            return {"table": self.table, "error": str(self.failed)}
        before, after = self.compaction.before, self.compaction.after
        return {
            "table": self.table,
            "files_before": before.files,
            "files_after": after.files,
            "bytes_before": before.bytes,
            "bytes_after": after.bytes,
            "files_with_deletion_vectors_before": before.marked,
            "files_with_deletion_vectors_after": after.marked,
            "too_busy": self.compaction.is_busy,
            "unfinished": self.compaction.is_left,
        }


@dataclass
class MaintenanceReport:
    """The result of the maintenance of a pipeline.

    `compacted_files`: changelog files that were compacted before the last step. `rest`: the result of the
    last step, None if pgrepl was asked to end before it.
    """

    pipeline: str
    tables: list[MaintainedTable] = field(default_factory=list)
    compacted_files: int = 0
    is_stopped: bool = False
    app_runs: bool = False
    rest: MaintenanceResult | None = None

    @property
    def failures(self) -> dict[str, PgReplError]:
        """Return the errors, by table or path."""
        own = {table.table: table.failed for table in self.tables if table.failed is not None}
        return {**own, **(self.rest.failed if self.rest is not None else {})}

    @property
    def exit_code(self) -> int:
        """Return the highest exit code of the errors.

        It is 75 too if a table was too busy or pgrepl was asked to end.
        """
        is_unfinished = self.is_stopped or any(table.is_busy for table in self.tables)
        codes = {process.exit_code(error) for error in self.failures.values()}
        return max(codes | {process.RETRY_MAY_HELP if is_unfinished else process.DONE})

    def to_text(self) -> str:
        """Return lines about the changelog, the deletions and the errors."""
        if self.rest is None:
            return f"changelog: compacted {self.compacted_files} files\nstopped before the deletion"
        rest = self.rest
        compacted = self.compacted_files + rest.compacted_files
        lines = [
            f"changelog: compacted {compacted} files, deleted {rest.changelog_files} files of expired hours",
            f"deleted: {rest.points} consistent points, {rest.files} files, {rest.log_entries} log entries",
        ]
        if self.app_runs:
            lines.append(
                "the replication app runs: it deletes expired hours and files of the changelog, and unneeded"
                " files and log entries of lake tables, itself"
            )
        lines += [f"{path}: left alone: {reason}" for path, reason in rest.left_alone.items()]
        lines += [f"{place}: failed: {error}" for place, error in rest.failed.items()]
        return "\n".join(lines)

    def to_report(self) -> dict[str, object]:
        """Return all results in JSON types."""
        rest = self.rest or MaintenanceResult()
        return {
            "pipeline": self.pipeline,
            "app_running": self.app_runs,
            "stopped_early": self.is_stopped,
            "tables": [table.to_report() for table in self.tables],
            "compacted_changelog_files": self.compacted_files + rest.compacted_files,
            "expired_changelog_files": rest.changelog_files,
            "deleted_consistent_points": rest.points,
            "deleted_files": rest.files,
            "deleted_log_entries": rest.log_entries,
            "left_alone": dict(rest.left_alone),
            "errors": {place: str(error) for place, error in self.failures.items()},
        }


OnTable = Callable[[MaintainedTable], object]


def maintain(
    access: Access,
    tables: Iterable[TableName | str] = (),
    limit_s: float = MAINTENANCE_LIMIT_S,
    *,
    wait: Wait,
    on_table: OnTable = lambda _: None,
) -> MaintenanceReport:
    """Compact lake tables (`tables`, or all) and closed hours of the changelog, then delete what is not
    needed.

    That is old consistent points, expired changelog hours, files and log entries. Ends between two commits
    when `wait` returns True. An error of one table or one path is in the result. Raises ConfigError for
    unknown tables, StateError, SourceConnectionError, NoChangelogError, LakeError if the lake is another
    pipeline's or is missing. Raises BusyError, which names the holder, while another maintenance of the
    pipeline runs, or its lake tables are being dropped.

    :param limit_s: seconds after which no further compaction begins
    :param on_table: called with the result of each table
    """
    with access.state_db("maintain") as state_db:
        evidence.check(access.pipeline, state_db, access.dsn, needs_source=False)
        named, name = list(tables), access.pipeline.name
        state_db.lock(name, "maintain")
        if named:
            refuse_without_lake(access.pipeline, "--tables", "leave it out: the changelog is maintained")
        records = choose(state_db, name, named) if named else list(recorded(state_db, name).values())
        run = _Run(access, state_db, begun_epoch(state_db, access.pipeline), time.monotonic() + limit_s, wait)
        done = MaintenanceReport(name)
        for table in run.compacted(records):
            done.tables.append(table)
            on_table(table)
        done.compacted_files = run.compact_hours()
        done.is_stopped = wait(0.0)
        if not done.is_stopped:
            done.app_runs, done.rest = run.delete_unneeded()
        return done


@dataclass(frozen=True)
class _Run:
    """The maintenance of one pipeline.

    `ends_at`: the time of the monotonic clock after which no compaction begins.
    """

    access: Access
    state_db: StateDatabase
    record: EpochRecord
    ends_at: float
    wait: Wait

    def compacted(self, records: Iterable[TableRecord]) -> Iterator[MaintainedTable]:
        """Compact each table that has been copied, and its history, and yield the results."""
        if not self.access.pipeline.has_lake_tables:
            return
        root, name = self.access.pipeline.lake_root, self.access.pipeline.name
        for table in [record.table for record in records]:
            # Read the record again: the table may be being copied again, and its copy must be able to commit.
            record = self.state_db.read_tables(name).get(table)
            if record is None or record.relation is None or record.state not in _COPIED:
                continue
            chosen = self.access.pipeline.options(table).policy.cluster_by
            cluster_by = chosen or [column.name for column in record.relation.key_columns]
            yield self._compact(str(table), f"{root}/{table.path}", cluster_by)
            uri = history_uri(root, table)
            # Leave histories to a running app: it appends to a history first, and takes a commit in between
            # for another app's.
            if has_delta(uri) and not self._app_runs():
                yield self._compact(history_key(table), uri, cluster_by)

    def compact_hours(self) -> int:
        """Compact closed hours of the changelog, and return the number of files that were replaced."""
        files = 0
        while not self._is_time_to_end():
            try:
                result = compact_closed_hours(
                    self.access.pipeline.lake_root, self.state_db.now(), _COMPACTION_BYTES
                )
            except PgReplError as error:
                # The last step tries this again, and reports the error.
                log.info("hours of the changelog are not compacted now: %s", error.message)
                break
            if not result.files:
                break
            files += result.files
        return files

    def delete_unneeded(self) -> tuple[bool, MaintenanceResult]:
        """Delete what is not needed. Return True if the replication app runs, and the result."""
        pipeline = self.access.pipeline
        # An app that starts after this begins at this version of the changelog or a later one.
        version = int(open_changelog(changelog_uri(pipeline.lake_root)).version())
        app_runs = self._app_runs()
        kept = None if app_runs else self._retention()
        result = Maintenance(pipeline, versions_for_points=self._versions_for_points).run(
            needed_above=None if kept is None else kept.needed_above,
            needed_later=() if kept is None else kept.needed_later,
            reader_version=None if app_runs else version,
        )
        return app_runs, result

    def _compact(self, name: str, uri: str, cluster_by: Sequence[str]) -> MaintainedTable:
        app = app_id(self.access.pipeline.name, self.record.epoch)
        try:
            done = compact_thoroughly(uri, app, cluster_by, self._is_time_to_end, self.wait)
            return MaintainedTable(name, done)
        except PgReplError as error:
            return MaintainedTable(name, failed=error)

    def _retention(self) -> Retention | None:
        """Return the retention as the app determines it. None, while unknown, deletes nothing."""
        pipeline = self.access.pipeline
        records = self.state_db.read_tables(pipeline.name).values()
        try:
            if pipeline.has_lake_tables:
                tables = RecordedTables(pipeline, self.record, ConsistentPoints(pipeline.lake_root))
                own = tables.needed_above(records, {})
            else:
                own = unchecked_above(records)
            needed = retention_lsn(self.access.dsn, pipeline, own)
            return None if needed is None else retention(pipeline, self.record.epoch, needed)
        except LakeError as error:
            log.warning("no hours of the changelog are deleted now: %s", error)
            return None

    def _versions_for_points(self) -> VersionsForPoints | None:
        """Return no versions; None if another process may know some: an app, or a snapshot that writes the
        first point of an epoch at its end."""
        name = self.access.pipeline.name
        return None if self._app_runs() or self.state_db.is_locked(name, "snapshot") else {}

    def _app_runs(self) -> bool:
        return self.state_db.is_locked(self.access.pipeline.name, "replicate")

    def _is_time_to_end(self) -> bool:
        return self.wait(0.0) or time.monotonic() >= self.ends_at
