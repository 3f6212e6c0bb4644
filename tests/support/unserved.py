"""A lake with one table and a changelog, made without a server: to read it as of an LSN."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA, changelog_uri
from airflow_provider_pgrepl.replication.changelog.relation_index import RelationIndex, relations_uri
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter, create_changelog
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.merge.merge import apply_changes
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_as_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.changelogs import epoch_record
from tests.support.changes import commit_ts, relation, table_of
from tests.support.model import Change

EPOCH = Epoch(1)


def numbered(*columns: Column, identity: str = "d") -> Relation:
    """Return a relation whose columns have their places as attnums."""
    placed = (replace(one, attnum=place) for place, one in enumerate(columns, start=1))
    return relation(*placed, identity=identity)


class UnservedLake:
    """The lake. `pipeline`: the pipeline file's settings now."""

    def __init__(self, root: Path, of: Relation, **settings: Any) -> None:
        self.of = of
        self.pipeline = Pipeline(name="p", lake=str(root), tables=(str(of.table),), **settings)
        create_changelog(changelog_uri(self.root), epoch_record())
        self.writer = ChangelogWriter(changelog_uri(self.root))
        self.copy(99)

    @property
    def root(self) -> str:
        return self.pipeline.lake_root

    @property
    def uri(self) -> str:
        return f"{self.root}/{self.of.table.path}"

    def configure(self, **settings: Any) -> None:
        """Change the pipeline file without a resnapshot."""
        self.pipeline = replace(self.pipeline, **settings)

    def copy(self, position: int) -> None:
        """Copy the table, without rows, with today's settings."""
        self.copied = self.pipeline.options(self.of.table)
        self.know(self.of)
        schema = lake_schema(self.of, self.copied)
        commit_snapshot(self.uri, schema, [], LSN(position), "p", EPOCH, None, self.of.version)
        self.note_point(position)

    def alter(self, of: Relation) -> None:
        """Give the table another definition, which is that of the next changes."""
        self.of = of
        self.know(of)

    def know(self, of: Relation) -> None:
        """Add a definition to the relation index."""
        RelationIndex(relations_uri(self.root)).add(EPOCH, RelationRecord.of_catalog(of))

    def receive(self, *changes: Change, of: Relation | None = None) -> pa.Table:
        """Write transactions into the changelog, and return their rows. `of`: another table's definition."""
        relation, rows = of or self.of, table_of(changes).select(ROW_SCHEMA.names)
        for name, value in (("relation_id", relation.oid), ("relation_version", relation.version)):
            values = pa.repeat(pa.scalar(value, pa.int64()), len(rows))
            rows = rows.set_column(rows.schema.get_field_index(name), name, values)
        lsns = [change.commit_lsn for change in changes]
        part = self.writer.write_part(rows)
        self.writer.append(
            [part],
            durable_lsn=LSN(lsns[-1] + 5),
            first_lsn=LSN(lsns[0]),
            last_lsn=LSN(lsns[-1]),
            last_commit_us=0,
        )
        return rows

    def apply(self, *changes: Change) -> None:
        """Receive transactions, apply them with the settings of the last copy, and note a point."""
        rows = self.receive(*changes)
        apply_changes(open_table(self.uri), rows, self.of, self.copied, app_id("p", EPOCH), 1 << 20)
        self.note_point(changes[-1].commit_lsn)

    def note_point(self, lsn: int) -> None:
        version = int(open_table(self.uri).version())
        point = ConsistentPoint(EPOCH, lsn, commit_ts(lsn), {str(self.of.table): version})
        ConsistentPoints(self.root).append(point)

    def read(self, lsn: int) -> pa.Table:
        return arrow_as_of(self.pipeline, str(self.of.table), lsn=lsn)
