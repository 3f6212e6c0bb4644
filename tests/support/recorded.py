"""A pipeline as its snapshot app leaves the source and the state, without a lake: recorded, all streaming."""

from __future__ import annotations

from typing import Any

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.source.publication import create_publication
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState


class Recorded:
    """A pipeline whose existing tables are published and recorded as `streaming`."""

    def __init__(self, dsn: str, *tables: str, **options: Any) -> None:
        options = {"name": "shop", "lake": "/nowhere", **options}
        self.pipeline = Pipeline(tables=tables or ("public.*",), **options)
        self.access = Access(self.pipeline, dsn, dsn)
        with self.access.source("test") as source, StateDatabase(dsn, "test") as state_db:
            state_db.migrate()
            relations = resolve_tables(source, self.pipeline)
            if self.pipeline.publication_mode == "create":
                create_publication(source, self.pipeline.publication, relations, made_for=self.pipeline.name)
            state_db.register(self.pipeline, read_server(source).system_identifier, True, True)
            self._record(
                state_db, read_relations(source, [r.oid for r in relations], self.pipeline.publication)
            )

    def _record(self, state_db: StateDatabase, relations: dict[int, Any]) -> None:
        for relation in relations.values():
            for state in (TableState.PENDING, TableState.SNAPSHOTTING):
                state_db.set_state(self.pipeline.name, relation.table, state)
            state_db.record_snapshot(self.pipeline.name, relation, LSN(1), 0, self.pipeline.to_json())
            for state in (TableState.CATCHING_UP, TableState.STREAMING):
                state_db.set_state(self.pipeline.name, relation.table, state)

    def record(self, table: str) -> TableRecord:
        with self.access.state_db("test") as state_db:
            return state_db.read_tables(self.pipeline.name)[TableName.parse(table)]

    def set_state(self, table: str, state: TableState, **more: Any) -> None:
        with self.access.state_db("test") as state_db:
            state_db.set_state(self.pipeline.name, TableName.parse(table), state, **more)
