"""The tables with which a further resync continues the present epoch: what an interrupted one has left."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import CommitProperties, Transaction, write_deltalake

from airflow_provider_pgrepl.replication.app.epoch import unwritten_tables
from airflow_provider_pgrepl.replication.app.tables import Records
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.delta.table import CLOSED
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.tables import TableRecord, TableState

EPOCH = EpochRecord("shop", Epoch(2), "7", 1, "pgrepl_shop", "pgrepl_shop", 5, LSN(5))
A, B, C = (TableName("public", name) for name in "abc")


class Lake:
    """A lake whose tables have commits of epochs, and the recorded states of these tables."""

    def __init__(self, folder: Path) -> None:
        self.pipeline = Pipeline(name="shop", tables=("public.*",), lake=str(folder))
        self.records: Records = {}

    def add(self, table: TableName, state: TableState, **versions: int) -> None:
        """Record a table. `versions`: by epoch, the versions of its app IDs; none if it was never copied."""
        unset: Any = {"error": "", "reason": "", "hint": "", "lsn": None, "relation": None}
        unset |= {"position_lsn": None, "snapshot_at": None, "rows_copied": None}
        self.records[table] = TableRecord(table, state, **unset, since=datetime(2026, 1, 1, tzinfo=UTC))
        if versions:
            apps = [Transaction(f"shop:{name.removeprefix('of_')}", at) for name, at in versions.items()]
            write_deltalake(
                f"{self.pipeline.lake_root}/{table.path}",
                pa.table({"id": [1]}),
                commit_properties=CommitProperties(app_transactions=apps),
            )

    def left(self) -> set[TableName]:
        return unwritten_tables(self.pipeline, EPOCH, self.records)


def test_a_table_that_only_an_earlier_epoch_has_written_is_left(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.add(A, TableState.STREAMING, of_1=CLOSED, of_2=7)
    lake.add(B, TableState.ERRORED, of_1=9)
    assert lake.left() == {B}
    lake.add(C, TableState.SNAPSHOTTING)
    assert lake.left() == {B, C}


def test_a_table_that_was_never_copied_does_not_mean_that_a_resync_was_interrupted(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.add(A, TableState.STREAMING, of_1=CLOSED, of_2=7)
    lake.add(B, TableState.ERRORED)
    lake.add(C, TableState.SNAPSHOTTING)
    assert lake.left() == set()


def test_a_removed_table_of_an_earlier_epoch_is_not_left(tmp_path: Path) -> None:
    lake = Lake(tmp_path)
    lake.add(A, TableState.REMOVED, of_1=9)
    assert lake.left() == set()
