"""Statistics of a lake table's files: no reader skips a file with a matching row, whatever wrote it."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import ParquetFiles
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import commit_snapshot
from airflow_provider_pgrepl.replication.lake.delta.table import app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.compaction import compact
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import quote_identifier

APP = app_id("p", Epoch(1))
NAN = float("nan")
ROWS = pa.table(
    {
        "id": pa.array([1, 2], pa.int64()),
        "f": [1.0, NAN],
        "g": pa.array([1.0, NAN], pa.float32()),
        "part": [{"f": 1.0}, {"f": NAN}],
        "d": pa.array([Decimal(1), Decimal(2**60 + 1)], pa.decimal128(20, 0)),
        "wide": pa.array([Decimal(10**37), Decimal(10**37 + 1)], pa.decimal128(38, 0)),
        "t": ["b", "x" * 1_000_000],
        "a.b": pa.array([1, 2], pa.int32()),
        'odd "name"': pa.array([1, 2], pa.int32()),
    }
)


def snapshot(table: DeltaTable) -> None:
    with ParquetFiles(table.table_uri.removeprefix("file://").rstrip("/"), "", ROWS.schema) as files:
        files.write(ROWS.combine_chunks().to_batches()[0])
        written = files.finish()
    commit_snapshot(table.table_uri, ROWS.schema, written, LSN(2), "p", Epoch(1))


def append(table: DeltaTable) -> None:
    SliceCommit(table, APP, LSN(2), None, 1).write(ROWS, "append")


def merge(table: DeltaTable) -> None:
    commit = SliceCommit(table, APP, LSN(2), None, 1)
    source = ROWS.rename_columns([f"c{index}" for index in range(ROWS.num_columns)])
    merger = commit.merge(source, ["t.id = s.c0"], ROWS.column_names)
    values = {quote_identifier(name): f"s.c{index}" for index, name in enumerate(ROWS.column_names)}
    commit.run(merger.when_not_matched_insert(values))


def compacted(table: DeltaTable) -> None:
    for lsn, row in ((2, ROWS.slice(0, 1)), (3, ROWS.slice(1))):
        SliceCommit(table, APP, LSN(lsn), None, 1).write(row, "append")
    assert compact(table, APP, at_least=1) == 2


@pytest.mark.parametrize("write", [snapshot, append, merge, compacted])
@pytest.mark.parametrize(
    "condition",
    [
        "f > 5",
        "g > 5",
        "part['f'] > 5",
        f"d = arrow_cast('{2**60 + 1}', 'Decimal128(20, 0)')",
        f"wide = arrow_cast('{10**37 + 1}', 'Decimal128(38, 0)')",
        "t > 'c'",
        "id = 2",
        '"a.b" = 2',
    ],
)
def test_a_row_is_found_by_each_of_its_values(tmp_path: Path, write, condition: str) -> None:
    table = written_by(write, tmp_path)
    found = QueryBuilder().register("t", table).execute(f"select id from t where {condition}").read_all()
    assert pa.table(found)["id"].to_pylist() == [2]


@pytest.mark.parametrize("write", [snapshot, append, merge, compacted])
def test_only_bounds_that_are_exact_and_short_stand_in_the_log(tmp_path: Path, write) -> None:
    written_by(write, tmp_path)
    log = sorted((tmp_path / "t" / "_delta_log").glob("*.json"))[-1].read_text()
    assert len(log) < 10_000
    (add,) = (json.loads(line)["add"] for line in log.splitlines() if "add" in json.loads(line))
    told = json.loads(add["stats"])
    assert told["maxValues"] == {"id": 2, "a.b": 2, 'odd "name"': 2}
    assert told["nullCount"].keys() == told["minValues"].keys() == told["maxValues"].keys()
    file = pq.ParquetFile(tmp_path / "t" / add["path"])
    group = file.metadata.row_group(0)
    for at in range(group.num_columns):
        column = group.column(at)
        if column.physical_type in ("FLOAT", "DOUBLE"):
            assert column.statistics is None or not column.statistics.has_min_max


def written_by(write, root: Path) -> DeltaTable:
    uri = str(root / "t")
    commit_snapshot(uri, ROWS.schema, [], LSN(1), "p", Epoch(1))
    write(open_table(uri))
    return open_table(uri)
