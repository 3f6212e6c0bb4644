"""Rows that another program writes into a lake table while changes are merged are found like any other."""

from __future__ import annotations

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.replication.lake.apply import table_merge
from tests.support.handed import Handed
from tests.support.replicated import execute

T = "public.t"


def test_they_are_found_wherever_the_lake_lies(dsn, tmp_path):
    """deltalake gives a table's location as a URI, in which a path is encoded."""
    execute(dsn, "create table t(id int primary key)", "insert into t values (1)")
    (folder := tmp_path / "a lake é").mkdir()
    handed = Handed(dsn, folder, (T,))
    relation = handed.copy(T)
    write_deltalake(handed.lake_path(T), pa.table(handed.lake_rows(T)), mode="append")
    execute(dsn, "insert into t values (2)")
    assert handed.stream(relation).error_kind == "LakeChangedError"


@pytest.mark.parametrize(
    "change", ["insert into t values (2)", "update t set id = 5", "delete from t", "truncate t"]
)
@pytest.mark.thorough("the same test, of INSERT and DELETE", "truncate t", "update t set id = 5")
def test_rows_that_came_between_reading_and_committing_stop_the_table(dsn, tmp_path, monkeypatch, change):
    execute(dsn, "create table t(id int primary key)", "insert into t values (1)")
    handed = Handed(dsn, tmp_path, (T,))
    relation = handed.copy(T)
    relation_timeline = table_merge.relation_timeline  # type: ignore[attr-defined]

    def written_meanwhile(*arguments):
        monkeypatch.setattr(table_merge, "relation_timeline", relation_timeline)
        rows = pa.table(handed.lake_rows(T)).slice(0, 1)
        write_deltalake(handed.lake_path(T), rows, mode="append")
        return relation_timeline(*arguments)

    monkeypatch.setattr(table_merge, "relation_timeline", written_meanwhile)
    execute(dsn, change)
    results = [handed.stream(relation)]
    execute(dsn, "insert into t values (9)")
    results.append(handed.stream(relation))
    # Where Delta itself rejects the commit, the changes are applied again, to a table that was reopened.
    assert [result.error_kind for result in results if result.error][-1:] == ["LakeChangedError"]
    assert DeltaTable(handed.lake_path(T)).version() >= 1
