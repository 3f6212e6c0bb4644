"""Brings tables to a snapshot by a comparison, instead of a copy: all tables of a new epoch, or single ones.

The newest version of the lake table, which may be of an earlier epoch, is compared with the source. One
commit under the present epoch's app ID closes the earlier epochs, sets the position, and replaces the rows
that differ. Files of equal rows stay. The commit is exactly the version after the compared one, so that no
other commit comes in between. Tables that cannot be compared, or differ too much, are copied.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import (
    FencedError,
    LakeError,
    LakeTableError,
    LakeUnavailableError,
    OvertakenError,
)
from airflow_provider_pgrepl.replication.lake.delta.commit import VersionTakenError, written_bytes
from airflow_provider_pgrepl.replication.lake.delta.live_files import check_files, settle_log
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import (
    RESYNC,
    check_ours,
    read_writers,
    snapshot_marks,
    warn_of_rows_of_lake,
)
from airflow_provider_pgrepl.replication.lake.delta.table import earlier_apps, open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import check_columns
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import CopyReport
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import (
    SnapshotCopy,
    rows_of_lake,
)
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.values import lake_schema

from .buckets import Buckets
from .comparison import LakeSide, Listed, SourceSide, TableComparer, TableComparison, counting, shape_of
from .kept_sums import find_kept_sums, forget_sums
from .repair import PickedRows, TableRepair, check_supported, pick, refusal_of

log = logging.getLogger(__name__)

MOST_ROWS = 1_000_000
"""The most rows in the differing buckets of a table that is repaired. Their hashes are held in memory."""
FEW_ROWS = 10_000
"""Up to this number, differing rows are replaced in any table. Beyond, a copy is faster if 5 % differ."""
_OF_ROWS = 20
_ATTEMPTS = 3


@dataclass(frozen=True)
class Compared:
    """A compared lake table, and the rows of either side that the other side lacks.

    `table`: the handle at the compared version.
    """

    table: DeltaTable
    comparison: TableComparison
    missing: PickedRows | None = None
    extra: PickedRows | None = None


class Resync(SnapshotCopy):
    """Compares the keeper's tables, which are in state `snapshotting`, with their lake tables, and copies
    those for which that is not possible."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._equal = set[TableName]()
        """The tables that were found equal to the source, or repaired."""

    def _copy(self, relation: Relation, report: CopyReport) -> int:
        started, table = time.monotonic(), relation.table
        self._check_replaceable(table)
        try:
            return self._take(relation, report, started)
        except LakeUnavailableError:
            raise
        except LakeError as error:
            log.warning("%s is copied, not compared: %s", table, error.message)
            return super()._copy(relation, report)

    def _finish(self, relation: Relation, rows: int) -> None:
        super()._finish(relation, rows)
        forget_sums(self._pipeline.lake_root, relation.table)
        if relation.table in self._equal:
            record = self._state_db.read_tables(self._pipeline.name)[relation.table]
            self._state_db.record_verified(
                self._pipeline.name, record, self._position, self._exported.exported_at
            )

    def _take(self, relation: Relation, report: CopyReport, started: float) -> int:
        """Compare the lake table, commit it with the rows of the snapshot, and return their number.

        Raises LakeError if it has to be copied, and what a copy raises.
        """
        if reason := refusal_of(relation, self._pipeline.options(relation.table)):
            raise LakeTableError(reason)
        for _ in range(_ATTEMPTS):
            compared = self._compare(relation, report)
            before = int(compared.table.version())
            try:
                self._commit_compared(relation, compared)
            except (VersionTakenError, OvertakenError, FencedError):
                # In a running epoch, a merge that began before ends now. If it is beyond the snapshot, the
                # next comparison is refused.
                log.info("%s is compared again: another process has written it", relation.table)
                continue
            size = written_bytes(compared.table.table_uri, before, int(compared.table.version()))
            self._log(relation.table, compared, self._measure(relation.table, size, started))
            self._equal.add(relation.table)
            return compared.comparison.source_rows
        raise LakeTableError("other processes have written it again and again")

    def _compare(self, relation: Relation, report: CopyReport) -> Compared:
        table = self._open(relation)
        options, lake = self._pipeline.options(relation.table), self._lake_at(relation, table)
        with self._keeper.hold(relation) as keeper:
            shape, buckets = shape_of(relation, options), Buckets.for_rows(lake.row_count)
            moment = (self._record, self._position, keeper.xmin())
            kept = find_kept_sums(self._pipeline.lake_root, relation, options, *moment, shape, buckets)
            shape, ranges = kept.shape, self._plan(keeper, relation, kept.ranges)
            read = (self._spark, self._dsn, keeper, relation, options, ranges, self._ranges_at_once)
            with report.copying(relation.table, ranges) as copy:
                source = SourceSide(*read, finished=counting(copy), kept=kept)
                comparer = TableComparer(source, lambda: lake, shape, kept.buckets, most_or_none=MOST_ROWS)
                comparison = comparer.compare()
            if any(part.copied is not None for part in ranges):
                log.info(
                    "%s: %d of %d ranges were read by an earlier comparison that has not ended",
                    *(relation.table, copy.unchanged, len(ranges)),
                )
            if comparison.status == "equal":
                return Compared(table, comparison)
            if comparison.listed is None:
                raise LakeTableError(
                    f"{comparison.differing_ranges:,} of {comparison.ranges:,} ranges of its rows differ"
                )
            rows, differing = comparison.source_rows, comparison.differences.rows
            if differing > max(FEW_ROWS, rows // _OF_ROWS):
                raise LakeTableError(f"{differing:,} rows differ from the {rows:,} rows of the source")
            missing = pick(source, shape, comparison.listed.missing)
            return Compared(table, comparison, missing, pick(lake, shape, comparison.listed.extra))

    def _open(self, relation: Relation) -> DeltaTable:
        """Open the lake table.

        Raises LakeError unless it is whole, only this pipeline has written it, and it has the columns and
        partitions that a copy would have.
        """
        uri, name, epoch = self._uri(relation.table), self._pipeline.name, self._record.epoch
        settle_log(uri, name)
        table = open_table(uri)
        check_files(table)
        check_ours(table, self._app, earlier_apps(name, epoch), self._position)
        check_columns(table, lake_schema(relation, self._pipeline.options(relation.table)), relation)
        check_supported(table)
        if (writers := read_writers(uri, int(table.version()))).foreign:
            raise LakeTableError(f"another program has written it (versions {writers.versions})")
        return table

    def _lake_at(self, relation: Relation, table: DeltaTable) -> LakeSide:
        version = TableVersion(relation.table, table.table_uri.rstrip("/"), int(table.version()))
        schema = pa.schema(table.schema().to_arrow())
        return LakeSide(self._spark, TablePlan(relation.table, version, self._position, relation, schema))

    def _commit_compared(self, relation: Relation, compared: Compared) -> None:
        """Commit the table with the rows of the snapshot. If rows were replaced, read all of it again, and
        raise LakeTableError unless it equals the source now."""
        uri, options = self._uri(relation.table), self._pipeline.options(relation.table)
        if compared.extra is not None:
            warn_of_rows_of_lake(uri, relation.table, rows_of_lake(self._pipeline, relation.table))
        name, exported_at = self._pipeline.name, self._exported.exported_at
        marks = snapshot_marks(uri, name, self._record.epoch, exported_at, self._add_to_index(relation))
        kind, more_marks = self._kind(uri)
        repair = TableRepair(relation, options, self._app, self._position, exported_at)
        self._check_timeline()
        repair.commit_as_copy(compared.table, compared.missing, compared.extra, {**marks, **more_marks}, kind)
        if compared.comparison.listed is not None:
            self._check_equal(relation, compared.table, compared.comparison.listed)
        self._conclude(relation.table, compared.table)

    def _kind(self, uri: str) -> tuple[str, Mapping[str, int]]:  # noqa: ARG002 - for subclasses
        """Return the kind of the commit after a comparison, and the app IDs that it sets in addition to those
        of a snapshot."""
        return RESYNC, {}

    def _check_equal(self, relation: Relation, table: DeltaTable, listed: Listed) -> None:
        found = self._lake_at(relation, table).collect(listed.whole)
        if differing := len(listed.at_source.differing(found)):
            raise LakeTableError(f"{differing} ranges of rows still differ after the repair")

    def _log(self, table: TableName, compared: Compared, seconds: float) -> None:
        found, differences = compared.comparison, compared.comparison.differences
        if found.status == "equal":
            log.info(
                "%s equals the source at %s: %d rows, compared in %.1f s",
                *(table, self._position, found.source_rows, seconds),
            )
            return
        log.info(
            "%s: version %d has the %d rows of the source at %s: %d were missing, %d extra, %d changed, in"
            " %.1f s",
            *(table, compared.table.version(), found.source_rows, self._position),
            *(differences.missing, differences.extra, differences.changed, seconds),
        )
