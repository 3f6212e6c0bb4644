"""Maintenance by hand: what the replication app does by itself every ten minutes, and more thoroughly.

It may run while that app does, and holds no lock. What only the app can know it is left to then: up to where
the changelog has been read, and what of it may go.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import LakeError, PgReplError
from airflow_provider_pgrepl.replication.app import evidence
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.app_arguments import MAINTENANCE_LIMIT_S
from airflow_provider_pgrepl.replication.app.epoch import begun_epoch
from airflow_provider_pgrepl.replication.app.lake_choice import refuse_without_lake
from airflow_provider_pgrepl.replication.app.needed_changes import (
    Retention,
    needed_above,
    retention,
    watched_above,
)
from airflow_provider_pgrepl.replication.app.operations.chosen_tables import choose, recorded
from airflow_provider_pgrepl.replication.app.operations.maintained import Maintained, MaintainedTable
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.changelog.maintenance import join_closed_hours
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.apply.table_records import RecordedTables
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.files.thorough_compaction import compact_thoroughly
from airflow_provider_pgrepl.replication.lake.history.place import history_key, history_uri
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance, MaintenanceResult
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.store import Store
from airflow_provider_pgrepl.replication.state.table_state import TableState
from airflow_provider_pgrepl.replication.state.tables import TableRecord

_JOINED_AT_A_TIME = 256 << 20
_COPIED = (TableState.CATCHING_UP, TableState.STREAMING, TableState.PAUSED, TableState.ERRORED)

log = logging.getLogger(__name__)

Wait = Callable[[float], bool]
"""Waits for so many seconds, or until the process is asked to end; whether it is."""
Tell = Callable[[MaintainedTable], object]


def maintain(
    access: Access,
    tables: Iterable[TableName | str] = (),
    limit_s: float = MAINTENANCE_LIMIT_S,
    *,
    wait: Wait,
    tell: Tell = lambda _: None,
) -> Maintained:
    """Compact lake tables (`tables`, or all), join closed hours of the changelog, then thin points and take
    away what nobody needs. Ends between two commits when `wait` says so; `tell` is called after each table.

    What fails at one table, or one place, is in the result. Raises ConfigError for unknown tables,
    StateError, SourceConnectionError, NoChangelogError, LakeError when the lake is another pipeline's or not
    there.
    """
    with access.store("maintain") as store:
        evidence.check(access.pipeline, store, access.dsn, needs_source=False)
        named, name = list(tables), access.pipeline.name
        if named:
            refuse_without_lake(access.pipeline, "--tables", "leave it out: the changelog is maintained")
        records = choose(store, name, named) if named else list(recorded(store, name).values())
        run = _Run(access, store, begun_epoch(store, access.pipeline), time.monotonic() + limit_s, wait)
        done = Maintained(name)
        for table in run.compacted(records):
            done.tables.append(table)
            tell(table)
        done.joined_files = run.join_hours()
        done.is_stopped = wait(0.0)
        if not done.is_stopped:
            done.app_runs, done.rest = run.take_away()
        return done


@dataclass(frozen=True)
class _Run:
    """Of one pipeline, up to a moment of the monotonic clock."""

    access: Access
    store: Store
    record: EpochRecord
    ends_at: float
    wait: Wait

    def compacted(self, records: Iterable[TableRecord]) -> Iterator[MaintainedTable]:
        """What became of each table that has been copied, and of its history."""
        if not self.access.pipeline.has_lake_tables:
            return
        root, name = self.access.pipeline.lake_root, self.access.pipeline.name
        for table in [record.table for record in records]:
            # Anew each time: it may be copied again by now, and the copy is to be committed.
            record = self.store.read_tables(name).get(table)
            if record is None or record.state not in _COPIED or record.relation is None:
                continue
            chosen = self.access.pipeline.choices(table).policy.cluster_by
            cluster_by = chosen or [column.name for column in record.relation.key_columns]
            yield self._compact(str(table), f"{root}/{table.path}", cluster_by)
            uri = history_uri(root, table)
            # The app appends to a history first, and takes a commit in between for another app's.
            if has_delta(uri) and not self._app_runs():
                yield self._compact(history_key(table), uri, cluster_by)

    def join_hours(self) -> int:
        """How many files of the changelog went into others."""
        files = 0
        while not self._is_time_to_end():
            try:
                joined = join_closed_hours(
                    self.access.pipeline.lake_root, self.store.now(), _JOINED_AT_A_TIME
                )
            except PgReplError as error:
                # What comes after this tries it again, and tells of it.
                log.info("hours of the changelog are not joined now: %s", error.message)
                break
            if not joined.files:
                break
            files += joined.files
        return files

    def take_away(self) -> tuple[bool, MaintenanceResult]:
        """Whether the app runs, and what went."""
        pipeline = self.access.pipeline
        # An app that starts from here on begins at this version of the changelog or a later one.
        version = int(open_changelog(changelog_uri(pipeline.lake_root)).version())
        app_runs = self._app_runs()
        kept = None if app_runs else self._retention()
        result = Maintenance(pipeline).run(
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
        """As the app has it; None, so that nothing goes, while it cannot be known what is needed."""
        pipeline = self.access.pipeline
        records = self.store.read_tables(pipeline.name).values()
        try:
            if pipeline.has_lake_tables:
                tables = RecordedTables(pipeline, self.record, Points(pipeline.lake_root))
                own = tables.needed_above(records, {})
            else:
                own = watched_above(records)
            needed = needed_above(self.access.dsn, pipeline, own)
            return None if needed is None else retention(pipeline, self.record.epoch, needed)
        except LakeError as error:
            log.warning("the changelog keeps its old hours for now: %s", error)
            return None

    def _app_runs(self) -> bool:
        return self.store.is_locked(self.access.pipeline.name, "replicate")

    def _is_time_to_end(self) -> bool:
        return self.wait(0.0) or time.monotonic() >= self.ends_at
