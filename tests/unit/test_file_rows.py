"""lake/files/row_search.py: the rows of files that are written again are those that no vector marks."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from pyroaring import BitMap64

from airflow_provider_pgrepl.replication.lake.delta.commit import commit_properties
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.files import row_search
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import replace_rows
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

APP = "p:1"


def mark(uri: str, rows: list[int], lsn: int) -> DeltaTable:
    table = open_table(uri)
    at = table, APP, LSN(lsn)
    replace_rows(*at, FileRows(table), {0: BitMap64(rows)}, [], commit_properties(APP, LSN(lsn), "changes"))
    return table


@pytest.mark.parametrize("batch_rows", [1, 4, 1000])
def test_rows_at_the_ends_of_batches_stay_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(row_search, "_BATCH_ROWS", batch_rows)
    uri = str(tmp_path / "t")
    write_deltalake(
        uri,
        pa.table({"id": pa.array(range(12), pa.int64())}),
        commit_properties=CommitProperties(app_transactions=[Transaction(APP, 1)]),
    )
    mark(uri, [0, 3, 11], 2)
    rows = FileRows(mark(uri, [4, 8], 3))
    left = [value for batch in rows.all_of(0) for value in batch["id"].to_pylist()]
    assert left == [1, 2, 5, 6, 7, 9, 10]
    assert len(rows.find(pa.table({"id": pa.array([0, 3, 4, 5], pa.int64())}))) == 1


def test_rows_behind_a_skipped_row_group_keep_their_numbers(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    write_deltalake(
        uri,
        pa.table({"id": pa.array(range(12), pa.int64()), "v": ["x"] * 12}),
        commit_properties=CommitProperties(app_transactions=[Transaction(APP, 1)]),
        writer_properties=WriterProperties(max_row_group_size=4, write_batch_size=4),
    )
    rows = FileRows(open_table(uri))
    places = rows.find(pa.table({"id": pa.array([9, 2], pa.int64()), "v": ["x", "x"]}))
    assert (places.row.tolist(), places.which.tolist()) == ([2, 9], [1, 0])
    assert FileRows(mark(uri, places.row.tolist(), 2)).gone(0) == BitMap64([2, 9])
    assert [len(batch) for batch in FileRows(open_table(uri)).all_of(0)] == [10]
