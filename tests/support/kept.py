"""A pipeline as its apps leave it, without Spark: copied, received, applied, and recorded in the state."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.errors import Remedy, SourceConnectionError
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState
from tests.support.handed import Handed
from tests.support.replicated import execute

_TO_STREAMING = (TableState.CATCHING_UP, TableState.STREAMING)


class Kept(Handed):
    """Handed, with several tables and their states."""

    _began: LSN | None = None
    _state_db: StateDatabase | None = None

    @property
    def access(self) -> Access:
        return Access(self.pipeline, self.dsn, self.dsn)

    def begin(self) -> LSN:
        if self._began is None:
            self._began = super().begin()
        return self._began

    def take(self, *tables: str) -> None:
        """Copy tables that no session is writing to, and set them to `streaming`."""
        self.begin()
        owned = self.pipeline.publication_mode == "create"
        state_db = self._opened_state()
        state_db.migrate()
        with self.source() as source:
            server = read_server(source)
        state_db.register(
            self.pipeline,
            server.system_identifier,
            True,
            owned,
            database=server.database,
            database_oid=server.database_oid,
            lake_id=lake_id(open_changelog(self.changelog)),
            replace=True,
        )
        for table in tables:
            self._set_states(state_db, table, TableState.PENDING, TableState.SNAPSHOTTING)
            relation = self.copy(table)
            position, config = LSN(self.begin() - 1), self.pipeline.to_json()
            state_db.record_snapshot(self.pipeline.name, relation, position, 0, config)
            self._set_states(state_db, table, *_TO_STREAMING)

    def set_states(self, table: str, *states: TableState, **more: Any) -> None:
        self._set_states(self._opened_state(), table, *states, **more)

    def _opened_state(self) -> StateDatabase:
        """Return the test's own session with the state, opened again if the server has ended it."""
        if self._state_db is not None:
            with contextlib.suppress(SourceConnectionError):
                self._state_db.now()
                return self._state_db
        self._state_db = StateDatabase(self.dsn, "test")
        return self._state_db

    def _set_states(self, state_db: StateDatabase, table: str, *states: TableState, **more: Any) -> None:
        for state in states:
            state_db.set_state(self.pipeline.name, TableName.parse(table), state, **more)

    def fail(
        self,
        table: str,
        error: str = "ValueRangeError",
        hint: str = "mend it, then retry the table",
        remedy: Remedy | None = None,
    ) -> None:
        """Mark a table errored."""
        self.set_states(table, TableState.ERRORED, error=error, reason="it failed", hint=hint, remedy=remedy)

    def record(self, table: str) -> TableRecord:
        return self._opened_state().read_tables(self.pipeline.name)[TableName.parse(table)]

    def states(self) -> dict[str, str]:
        records = self._opened_state().read_tables(self.pipeline.name).values()
        return {str(record.table): record.state.value for record in records}

    def bring_forward(self, table: str) -> TableResult:
        """Receive, and apply the changes to a table, as the replication app does."""
        relation = self.record(table).relation
        assert relation is not None
        return self.stream(relation)

    def bring_all_forward(self, *tables: str) -> list[TableResult]:
        """Receive once, and apply the missing changes to each table."""
        self.receive()
        relations = [self.record(table).relation for table in tables]
        return [self.hand(relation) for relation in relations if relation is not None]

    def write_point(self, lsn: LSN, *tables: str) -> None:
        versions = {table: open_table(self.lake_path(table)).version() for table in tables}
        ConsistentPoints(self.pipeline.lake_root).append(ConsistentPoint(1, lsn, None, versions))


TABLES = ("create table a (id int primary key)", "create table b (id int primary key)")
A, B = "public.a", "public.b"


def kept_tables(dsn: str, folder: Path, **options: Any) -> Kept:
    """A pipeline of all tables of a schema, with A and B streaming."""
    execute(dsn, *TABLES)
    found = Kept(dsn, folder, ("public.*",), **options)
    found.take(A, B)
    return found
