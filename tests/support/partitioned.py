"""Checks of a partitioned lake table that hold for every writer."""

from __future__ import annotations

import pyarrow.parquet as pq
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.tables import PARTITION, TableOptions
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions
from airflow_provider_pgrepl.replication.values import partitioning


def check_partitions(uri: str, of: Relation, options: TableOptions) -> dict[str | None, int]:
    """Check that each file's rows belong to the partition that the log names for it, by their values.

    Returns the number of rows by partition."""
    table = open_table(uri)
    partitions = partitioning(of, options)
    if partitions is None:
        assert table.metadata().partition_columns == []
        return {}
    assert table.metadata().partition_columns == [PARTITION]
    rows, counts = FileRows(table), dict[str | None, int]()
    for number, file in enumerate(rows.files):
        assert file.action["partitionValues"] == {PARTITION: file.partition}
        assert "/" not in file.path
        physical = pq.read_table(f"{uri}/{file.path}", columns=[PARTITION])[PARTITION]
        assert set(physical.to_pylist()) <= {file.partition}
        for part in rows.all_of(number):
            assert part[PARTITION].to_pylist() == [file.partition] * len(part)
            assert partitions.texts(part[partitions.typed.name]).to_pylist() == [file.partition] * len(part)
            counts[file.partition] = counts.get(file.partition, 0) + len(part)
    _check_removed(table)
    return {partition: count for partition, count in counts.items() if count}


def _check_removed(table: DeltaTable) -> None:
    """Check that each file is removed with the partition values with which it was added."""
    filesystem, root = open_storage(table.table_uri)
    came: dict[str, object] = {}
    for version in range(int(table.version()) + 1):
        actions = read_commit_actions(filesystem, root, version)
        came |= {a["add"]["path"]: a["add"]["partitionValues"] for a in actions if "add" in a}
        for action in actions:
            if "remove" in action:
                assert action["remove"]["partitionValues"] == came[action["remove"]["path"]]


def files_by_partition(uri: str) -> dict[str | None, int]:
    counts: dict[str | None, int] = {}
    for file in live_files(open_table(uri)).values():
        counts[file.partition] = counts.get(file.partition, 0) + 1
    return counts
