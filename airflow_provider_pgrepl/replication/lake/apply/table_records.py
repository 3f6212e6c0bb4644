"""Creates the work on tables from the records of a pipeline's tables."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.consistent_points import (
    ConsistentPoint,
    ConsistentPoints,
    TablePosition,
    read_table_position,
)
from airflow_provider_pgrepl.replication.lake.delta.commit import commit_nothing, commit_properties
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.history.table import advance_history
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline, changed_options, copied_options
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

from .table_merge import TableContext

log = logging.getLogger(__name__)
_STOPPED = (TableState.ERRORED, TableState.REMOVED)
_HIGHEST = LSN((1 << 64) - 1)


class RecordedTables:
    """The recorded tables of a pipeline, and the settings with which each was copied."""

    def __init__(self, pipeline: Pipeline, record: EpochRecord, points: ConsistentPoints) -> None:
        self._pipeline = pipeline
        self._record = record
        self._points = points
        self._app = app_id(pipeline.name, record.epoch)
        self._copied: dict[TableName, tuple[str | None, TableOptions]] = {}

    def work(self, record: TableRecord, position: int = 0, version: int | None = None) -> TableContext:
        """Return the work for a table that has been copied. Raises ConfigError, LakeError.

        `position`: the position that the table is known to have reached. `version`: a version that this
        pipeline is known to have written, or None.
        """
        assert record.relation is not None
        return TableContext(
            record.relation,
            self._choices(record),
            self._app,
            self._pipeline.lake_root,
            self._pipeline.slice_bytes,
            version,
            position,
        )

    def table_position(self, record: TableRecord) -> TablePosition | None:
        """Return up to which LSN a table is complete. None if this epoch never wrote it, or if it cannot be
        read: then its merge fails with the same error, and reports it.

        If the table was reverted, log a warning and remove it from the consistent points that name what it
        lost. Raises LakeError.
        """
        try:
            _, _, position = self._read(record)
        except LakeTableError:
            return None
        if position is not None and position.seen is not None:
            self._disown(record.table, position)
        return position

    def store_position(self, record: TableRecord) -> None:
        """Store in a lake table, and in its history, up to which LSN it is complete, if only a consistent
        point shows that.

        For a table to which no changes are applied: the points that name it expire, and so do the changes
        that it does not need according to them. Raises LakeError, FencedError, OvertakenError.
        """
        work = self.work(record)
        table, point, position = self._read(record)
        if point is None or position is None or position.whole <= position.own:
            return
        whole, commit_ts = position.whole, point.commit_ts
        # As in a merge, the history is first: it may be ahead of its table, not behind.
        if work.history_uri is not None:
            advance_history(
                open_table(work.history_uri), record.table, work.lake_root, work.app, whole, commit_ts
            )
        commit_nothing(table, work.app, whole, commit_properties(work.app, whole, "changes", commit_ts))

    def _read(self, record: TableRecord) -> tuple[DeltaTable, ConsistentPoint | None, TablePosition | None]:
        """Return a lake table, the newest point that names it, and its position."""
        table = open_table(f"{self._pipeline.lake_root}/{record.table.path}")
        point = self._points.last_of(record.table, self._record.epoch)
        return table, point, read_table_position(table, self._app, str(record.table), point)

    def needed_above(self, records: Iterable[TableRecord], known: Mapping[int, LSN]) -> LSN | None:
        """Return the lowest LSN above which one of these tables needs changes. None if one is being copied,
        or if this is not known.

        Returns the highest LSN if all tables are errored or removed: their changes expire by age, as those of
        an errored table among others do.
        `known`: the positions of tables that have caught up, by relation id. A table whose position cannot be
        read needs all changes (0).
        """
        records = list(records)
        if records and all(record.state in _STOPPED for record in records):
            return _HIGHEST
        needed = []
        for record in records:
            if record.state is TableState.SNAPSHOTTING:
                return None
            if record.relation is None or not record.state.needs_changes:
                continue
            if record.relation.oid in known:
                needed.append(known[record.relation.oid])
            else:
                position = self.table_position(record)
                needed.append(LSN(0) if position is None else position.whole)
        return min(needed, default=None)

    def _disown(self, table: TableName, position: TablePosition) -> None:
        log.warning(
            "table %s was reverted: its lake table is at %s (version %d), but a consistent point"
            " recorded it at %s. Its folder was restored from a copy or lost commits. Applying the"
            " missing changes from the changelog",
            *(table, position.own, position.version, position.seen),
        )
        self._points.disown(table, self._record.epoch, position.own, position.version)

    def _choices(self, record: TableRecord) -> TableOptions:
        config, options = self._copied.get(record.table, (None, None))
        if options is None or config != record.config:
            changed = changed_options(self._pipeline, record.config, record.table)
            if changed:
                log.warning(
                    "table %s: %s changed in the pipeline file; takes effect when the table is resnapshotted",
                    record.table,
                    ", ".join(changed),
                )
            options = copied_options(self._pipeline, record.config, record.table)
            self._copied[record.table] = record.config, options
        return options
