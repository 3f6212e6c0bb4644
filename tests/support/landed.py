"""A pipeline with a lake and no Spark: tables are copied empty, and applied when a test says so."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.changelog.reader import live_files, open_changelog, read_epoch
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.apply.table_merge import (
    TableContext,
    TableResult,
    bring_forward,
)
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history.table import history_key, prepare_history
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.received import Received


class Landed(Received):
    """A received pipeline with lake tables; the source's tables are empty when it begins."""

    def begin(self) -> LSN:
        place = super().begin()
        with self.source() as source:
            oids = [relation.oid for relation in resolve_tables(source, self.pipeline)]
            found = [read_relation(source, oid, self.pipeline.publication) for oid in oids]
        self.relations: list[Relation] = [relation for relation in found if relation is not None]
        for relation in self.relations:
            self.copy(relation, place)
        return place

    def copy(self, relation: Relation, consistent_point: LSN) -> None:
        """Copy an empty table."""
        epoch = read_epoch(self.changelog).epoch
        record = RelationRecord.of_catalog(relation)
        RelationIndex(relations_uri(self.pipeline.lake_root)).add(epoch, record)
        now, position = datetime.now(UTC), LSN(consistent_point - 1)
        if self.pipeline.options(relation.table).policy.history:
            prepare_history(relation, self.pipeline, position, epoch, now)
        commit_snapshot(
            self.lake_path(str(relation.table)),
            lake_schema(relation, self.pipeline.options(relation.table)),
            [],
            position,
            self.pipeline.name,
            epoch,
            now,
            record.version,
        )

    def apply(self) -> list[TableResult]:
        """Apply all durable changes to every table, and record the consistent point."""
        changelog, record = open_changelog(self.changelog), read_epoch(self.changelog)
        paths = [file.path for file in live_files(changelog, record.epoch, LSN(0))]
        durable, app = self.durable_lsn, app_id(self.pipeline.name, record.epoch)
        works = [
            TableContext(
                relation,
                self.pipeline.options(relation.table),
                app,
                self.pipeline.lake_root,
                self.pipeline.slice_bytes,
            )
            for relation in self.relations
        ]
        results = [bring_forward(work, paths, durable) for work in works]
        versions = {
            str(work.relation.table): result.version
            for work, result in zip(works, results, strict=True)
            if result.error is None
        }
        versions |= {
            history_key(work.relation.table): result.history_version
            for work, result in zip(works, results, strict=True)
            if result.history_version is not None
        }
        point = ConsistentPoint(record.epoch, LSN(durable - 1), datetime.now(UTC), versions)
        ConsistentPoints(self.pipeline.lake_root).append(point)
        return results
