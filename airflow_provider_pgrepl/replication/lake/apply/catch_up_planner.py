"""CatchUpPlanner: which files of the changelog bring lagging tables forward."""

from __future__ import annotations

from collections.abc import Mapping

from airflow_provider_pgrepl.replication.changelog import reader
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord, changelog_uri
from airflow_provider_pgrepl.replication.lake.apply.batch_ends import BatchEnd
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableWork
from airflow_provider_pgrepl.replication.lake.apply.table_position import TablePosition
from airflow_provider_pgrepl.replication.lake.apply.table_records import RecordedTables
from airflow_provider_pgrepl.replication.lake.apply.table_result import TableResult
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.tables import TableRecord


def snapshot_of(record: TableRecord) -> LSN:
    """The position at which a table was copied."""
    return record.position_lsn or LSN(0)


class CatchUpPlanner:
    """Plans a batch of bytes for each table, and remembers what was looked through in vain."""

    def __init__(self, pipeline: Pipeline, record: EpochRecord, tables: RecordedTables) -> None:
        self._pipeline = pipeline
        self._record = record
        self._tables = tables
        # Files that hold no change of a table do not move its position: they must not be taken for ever.
        # What was looked through is kept with the position above which it was.
        self._looked_through: dict[int, tuple[LSN, LSN]] = {}

    def plan(
        self, behind: Mapping[int, TableRecord], end: BatchEnd
    ) -> tuple[list[TableResult], list[MergeJob]]:
        """Errors of tables that cannot be brought forward, and jobs of the others, up to a batch's end."""
        changelog = reader.open_changelog(changelog_uri(self._pipeline.lake_root))
        floor = reader.read_floor_lsn(changelog, self._record.epoch)
        kept = floor, reader.read_durable_lsn(changelog)
        standings = {oid: self._tables.standing(record) for oid, record in behind.items()}
        refused = {
            oid: TableResult.of_error(oid, problem)
            for oid, standing in standings.items()
            if standing and (problem := standing.problem(snapshot_of(behind[oid]), *kept))
        }
        needed = {oid: self._needed(oid, standings[oid]) for oid in behind if oid not in refused}
        # Listed once: it costs the more the longer changes are kept, whatever the table.
        lowest = min(needed.values(), default=LSN(0))
        files = reader.live_files(changelog, self._record.epoch, lowest) if needed else []
        jobs = [
            MergeJob.plan(
                self._work(behind[oid], standings[oid]),
                snapshot_of(behind[oid]),
                [file for file in files if file.max_lsn > above],
                (end.version, LSN(end.lsn + 1)),
                self._pipeline.batch_bytes,
            )
            for oid, above in needed.items()
        ]
        return list(refused.values()), jobs

    def remember(self, oid: int, position: LSN, reach: LSN) -> None:
        """Files up to `reach` were looked through for a table that stays at `position`."""
        self._looked_through[oid] = position, reach

    def _needed(self, oid: int, standing: TablePosition | None) -> LSN:
        """Above which LSN the table needs what the changelog holds."""
        if standing is None:
            return LSN(0)
        then, reach = self._looked_through.get(oid, (LSN(0), LSN(0)))
        return max(standing.whole, reach) if then <= standing.own else standing.whole

    def _work(self, record: TableRecord, standing: TablePosition | None) -> TableWork:
        if standing is None:
            return self._tables.work(record)
        return self._tables.work(record, standing.own, standing.known)
