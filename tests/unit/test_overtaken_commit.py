"""lake/delta/commit.py: a handle that has taken in another writer's commit is not used again."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    commit_nothing,
    commit_properties,
    fenced,
)
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch

APP = app_id("p", Epoch(1))
IDS = pa.schema([("id", pa.int64())])


@pytest.fixture
def uri(tmp_path: Path) -> str:
    with ParquetFiles(str(tmp_path), "public/t", IDS) as files:
        commit_snapshot(f"{tmp_path}/public/t", IDS, files.finish(), LSN(10), "p", Epoch(1))
    return f"{tmp_path}/public/t"


def test_writer_whose_commit_was_overtaken_before_the_handle_was_refreshed_is_fenced(uri: str) -> None:
    """Some ways to commit refresh the handle, which may then stand behind a commit of another writer."""
    table = open_table(uri)

    def commit() -> None:
        commit_nothing(table, APP, LSN(20), commit_properties(APP, LSN(20), "changes"))
        commit_nothing(open_table(uri), APP, LSN(30), commit_properties(APP, LSN(30), "changes"))
        table.update_incremental()

    with pytest.raises(FencedError, match="moved its position"):
        fenced(table, APP, LSN(20), commit)
