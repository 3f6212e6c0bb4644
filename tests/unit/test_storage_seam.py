"""Delta tables and files of a lake are opened in one place, so that a new storage is taught there alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.replication.delta.table import (
    append_delta,
    create_delta,
    has_delta,
    open_delta,
    query_delta,
)
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions

REPLICATION = Path(__file__).parents[2] / "airflow_provider_pgrepl" / "replication"
OPENED_IN = (Path("storage"), Path("delta"))
OPENS = {
    "DeltaTable", "DeltaTable.create", "DeltaTable.is_deltatable", "create_table_with_add_actions",
    "pq.read_table", "pq.write_to_dataset", "pads.dataset", "ds.dataset", "fs.LocalFileSystem",
    "fs.FileSystem.from_uri", "pafs.LocalFileSystem", "pafs.FileSystem.from_uri",
}  # fmt: skip
"""Calls that open a table or a filesystem by its name."""


def test_only_storage_opens_tables_and_filesystems() -> None:
    assert list(_opens("x = DeltaTable(uri); y = pq.read_table(path)")) == ["DeltaTable", "pq.read_table"]
    found = {
        str(file.relative_to(REPLICATION)): opens
        for file in REPLICATION.rglob("*.py")
        if file.parent.relative_to(REPLICATION) not in OPENED_IN and (opens := list(_opens(file.read_text())))
    }
    assert found == {}


def _opens(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in OPENS:
            yield name


SCHEMA = pa.schema([("a", pa.int64()), ("hour", pa.string())])


def test_a_table_is_made_once(tmp_path: Path) -> None:
    uri = str(tmp_path / "deep" / "table")
    assert not has_delta(uri)
    with pytest.raises(TableNotFoundError):
        open_delta(uri)
    properties = CommitProperties(app_transactions=[Transaction("it", 7)])
    create_delta(
        uri,
        SCHEMA,
        {"delta.enableExpiredLogCleanup": "false"},
        properties,
        partition_by=["hour"],
        description="of a test",
    )
    table = open_delta(uri)
    assert has_delta(uri)
    assert (table.version(), table.transaction_version("it")) == (0, 7)
    assert table.metadata().partition_columns == ["hour"]
    assert table.metadata().description == "of a test"
    with pytest.raises(DeltaError):
        create_delta(uri, SCHEMA, {})
    assert open_delta(uri).version() == 0


def test_rows_are_appended_and_any_version_opens(tmp_path: Path) -> None:
    uri = str(tmp_path / "table")
    append_delta(uri, pa.table({"a": [1, 2]}))
    append_delta(uri, pa.table({"a": [3], "b": ["x"]}))
    newest = query_delta(open_delta(uri), "select a, b from it order by a").to_pylist()
    assert newest == [{"a": 1, "b": None}, {"a": 2, "b": None}, {"a": 3, "b": "x"}]
    first: DeltaTable = open_delta(uri, 0)
    assert sorted(query_delta(first, "select * from it")["a"].to_pylist()) == [1, 2]
    filesystem, root = open_storage(uri)
    assert [
        action["add"]["size"] > 0 for action in read_commit_actions(filesystem, root, 1) if "add" in action
    ] == [True]
    with pytest.raises(FileNotFoundError):
        read_commit_actions(filesystem, root, 2)
