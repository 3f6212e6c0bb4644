"""A pipeline without Spark: copied, received and applied by the same functions that Spark's tasks call."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.drift.matching import without_excluded_defaults
from airflow_provider_pgrepl.replication.lake.apply.table_merge import (
    TableContext,
    TableResult,
    bring_forward,
)
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history.table import prepare_history
from airflow_provider_pgrepl.replication.lake.snapshot.range_copy import write_range
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.copy.copy_stream import plan_ranges
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.values import copied_part, lake_schema
from tests.conftest import closing_connection
from tests.support.received import Received


class Handed(Received):
    """A pipeline whose received changes are applied by the functions that Spark's tasks run."""

    def copy(self, table: str) -> Relation:
        """Set up the pipeline, and copy a table that no session is writing to."""
        return self.copy_at(LSN(self.begin() - 1), table)

    def copy_at(self, position: LSN, table: str) -> Relation:
        """Copy a table that no session has written to since this position."""
        with self.source() as source:
            watching = trigger.read_watching(source, self.pipeline)
        with closing_connection(self.dsn) as keeper, keeper.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read read only")
            cursor.execute("select pg_export_snapshot()")
            snapshot = cursor.fetchone()[0]
            relation = find_relation(keeper, TableName.parse(table), self.pipeline.publication)
            assert relation is not None
            relation = without_excluded_defaults(relation, self.pipeline)
            options, root = self.pipeline.options(relation.table), self.pipeline.lake_root
            files = [
                file
                for part in plan_ranges(keeper, copied_part(relation, options), 1 << 40)
                for file in write_range(
                    self.dsn, snapshot, part, relation, options, root, position, datetime.now(UTC)
                )
            ]
        schema, now = lake_schema(relation, options), datetime.now(UTC)
        RelationIndex(relations_uri(self.pipeline.lake_root)).add(
            Epoch(1),
            RelationRecord.of_catalog(relation),
            None if watching is None else EffectiveFrom(position, watching),
        )
        if options.policy.history:
            prepare_history(relation, self.pipeline, position, Epoch(1), now)
        commit_snapshot(
            self.lake_path(table),
            schema,
            files,
            position,
            self.pipeline.name,
            Epoch(1),
            now,
            relation.version,
        )
        return relation

    def stream(self, relation: Relation) -> TableResult:
        self.receive()
        return self.hand(relation)

    def hand(self, relation: Relation) -> TableResult:
        work = TableContext(
            relation,
            self.pipeline.options(relation.table),
            app_id(self.pipeline.name, Epoch(1)),
            self.pipeline.lake_root,
            self.pipeline.slice_bytes,
        )
        return bring_forward(work, [file.path for file in self.changelog_files()], LSN(2**62))
