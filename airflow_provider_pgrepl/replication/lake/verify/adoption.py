"""Adopts lake tables that another program has written: compares them with the source, instead of copying it.

A table must have the columns of a copy. Only the pipeline's own columns may be missing: a commit without data
adds them, and they stay null in the rows that stay. The commit of the comparison makes the table this
pipeline's. Nothing is changed before the comparison shows that few rows differ.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, Field, Schema

from airflow_provider_pgrepl.errors import LakeError, LakeTableError, LakeUnavailableError
from airflow_provider_pgrepl.replication.delta.log import commit_token, metadata_action
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    VersionTakenError,
    commit_actions,
    find_fixed_columns,
    find_obstacle,
    try_commit,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import check_files, first_empty_commit
from airflow_provider_pgrepl.replication.lake.delta.ownership import ADOPTED_APP, read_ownership
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import ADOPTION, table_properties
from airflow_provider_pgrepl.replication.lake.delta.statistics import columns_found_bounded, declaration
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import check_columns
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import CopyReport
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, lake_schema

from .repair import check_supported
from .resync import Compared, Resync


class Adoption(Resync):
    """Adopts those of the keeper's tables that another program has written, and copies the others."""

    def _copy(self, relation: Relation, report: CopyReport) -> int:
        table, uri, started = relation.table, self._uri(relation.table), time.monotonic()
        if not self._adopts(uri):
            # A run may have adopted it, and ended before the state had a record of that.
            way = Resync._copy if has_delta(uri) else SnapshotCopy._copy
            return way(self, relation, report)
        try:
            return self._take(relation, report, started)
        except LakeUnavailableError:
            raise
        except LakeError as error:
            if not self._adopts(uri):  # The error came after the commit.
                raise
            reason = error.message.removeprefix(f"{table}: ")
            raise LakeTableError(
                f"{table}: the lake table that another program has written is not adopted: {reason}",
                "remove the cause; or move the table's folder out of the lake. Then run pgrepl snapshot"
                f" FILE.json --adopt {table}, which copies a table without a folder",
            ) from None

    def _open(self, relation: Relation) -> DeltaTable:
        """Open the lake table. Raises LakeError unless it has the columns and partitions of a copy, and no
        setting that rejects commits of this package."""
        uri = self._uri(relation.table)
        if not self._adopts(uri):
            return super()._open(relation)
        table = open_table(uri)
        check_files(table)
        if (empty := first_empty_commit(uri)) is not None:
            raise LakeTableError(f"the file of its commit {empty} is empty")
        held = {field.name for field in table.schema().fields}
        check_columns(
            table, pa.schema(field for field in self._wanted(relation) if _may_be(field, held)), relation
        )
        if obstacles := list(_obstacles(table)):
            raise LakeTableError(f"the table has {', '.join(obstacles)}")
        check_supported(table)
        return table

    def _commit_compared(self, relation: Relation, compared: Compared) -> None:
        if self._adopts(compared.table.table_uri):
            self._add_own_columns(relation, compared.table)
        super()._commit_compared(relation, compared)

    def _kind(self, uri: str) -> tuple[str, Mapping[str, int]]:
        return (ADOPTION, {ADOPTED_APP: 1}) if self._adopts(uri) else super()._kind(uri)

    def _adopts(self, uri: str) -> bool:
        return read_ownership(uri, self._pipeline.name).is_adoptable

    def _add_own_columns(self, relation: Relation, table: DeltaTable) -> None:
        """Add the columns that a copy would have, and the properties of a lake table, as exactly the next
        version. Raises OvertakenError or VersionTakenError if another program commits first."""
        fields = table.schema().fields
        held = {field.name for field in fields}
        wanted = Schema.from_arrow(self._wanted(relation)).fields
        added = [Field(field.name, field.type, nullable=True) for field in wanted if field.name not in held]
        properties = table_properties(table.table_uri) | declaration(columns_found_bounded(table))
        action = metadata_action(table, properties, Schema([*fields, *added]))
        about = CommitProperties(custom_metadata=commit_token())
        try_commit(
            table, lambda: commit_actions(table, "ADD COLUMNS", about, [action]), passing=(VersionTakenError,)
        )

    def _wanted(self, relation: Relation) -> pa.Schema:
        return lake_schema(relation, self._pipeline.options(relation.table))


def _may_be(field: pa.Field, held: set[str]) -> bool:
    return field.name in held or field.name not in (COMMIT_LSN, COMMIT_TS)


def _obstacles(table: DeltaTable) -> Iterator[str]:
    found = (
        find_obstacle(table, at_rows=True),
        find_obstacle(table, at_rows=False),
        find_fixed_columns(table),
    )
    yield from dict.fromkeys(obstacle.what for obstacle in found if obstacle is not None)
