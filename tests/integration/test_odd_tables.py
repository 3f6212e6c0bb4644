"""Tables that differ from what a table usually is, from source to lake, without Spark."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from tests.support.handed import Handed


def test_columnless_table_replicates_row_count_until_replica_identity_changes(dsn, run, tmp_path):
    run("create table columnless ()", "insert into columnless select from generate_series(1, 3)")
    handed = Handed(dsn, tmp_path, ("public.columnless",), insert_only=("public.columnless",))
    relation = handed.copy("public.columnless")
    assert handed.lake_rows("public.columnless").num_rows == 3
    run("insert into columnless default values", "insert into columnless default values")
    assert handed.stream(relation).error is None
    assert handed.lake_rows("public.columnless").num_rows == 5
    run("truncate columnless", "insert into columnless default values")
    assert handed.stream(relation).error is None
    assert handed.lake_rows("public.columnless").num_rows == 1
    run("alter table columnless replica identity full", "delete from columnless")
    assert handed.stream(relation).error == "the replica identity changed"


def test_a_table_without_columns_whose_rows_may_be_deleted_is_refused(pg, run):
    run("create table columnless ()", "alter table columnless replica identity full")
    for insert_only in ((), ("public.columnless",)):
        pipeline = Pipeline(name="p", lake="/l", tables=("public.columnless",), insert_only=insert_only)
        with pytest.raises(TableError, match="deleted rows cannot be told from others"):
            resolve_tables(pg, pipeline)


def test_a_table_of_columns_that_are_never_sent_has_nulls(dsn, pg, run, tmp_path):
    run(
        "create table computed (id int primary key, v int, g int generated always as (v) stored)",
        "insert into computed select i, i from generate_series(1, 3) i",
        "create publication theirs for table computed",
    )
    handed = Handed(
        dsn,
        tmp_path,
        ("public.computed",),
        publication="theirs",
        publication_mode="use",
        exclude_columns=("public.computed.v",),
    )
    relation = handed.copy("public.computed")
    run("update computed set v = 9 where id = 1", "delete from computed where id = 2")
    assert handed.stream(relation).error is None
    rows = handed.lake_rows("public.computed")
    assert rows.column_names[:2] == ["id", "g"]
    assert sorted(rows["id"].to_pylist()) == [1, 3]
    assert rows["g"].to_pylist() == [None, None]


@pytest.mark.parametrize(
    "change",
    [
        "update root set b = -b where id = 918273",
        "delete from root where id = 918273",
        "update root set id = 918274 where id = 918273",
    ],
)
@pytest.mark.thorough(
    "the same test, of a deleted row",
    "update root set b = -b where id = 918273",
    "update root set id = 918274 where id = 918273",
)
def test_a_partition_that_came_later_with_another_identity_stops_the_table(dsn, run, tmp_path, change):
    """It does not inherit REPLICA IDENTITY USING INDEX: what it sends does not tell which row was changed."""
    run(
        "create table root (id int primary key, b int not null) partition by range (id)",
        "create unique index root_b on root (id, b)",
        "alter table root replica identity using index root_b",
        "create table one partition of root for values from (0) to (10)",
        "alter table one replica identity using index one_id_b_idx",
        "insert into root values (1, 1), (2, 2)",
    )
    handed = Handed(dsn, tmp_path, ("public.root",))
    relation = handed.copy("public.root")
    run(
        "create table two partition of root for values from (10) to (1000000)",
        "insert into root values (918273, 918273)",
        "update root set b = 5 where id = 1",
    )
    assert handed.stream(relation).error is None
    handed.assert_equal("public.root")
    run(change)
    done = handed.stream(relation)
    assert done.error is not None
    assert "918273" not in done.error


def test_an_infinite_date_as_key_stops_the_table(dsn, run, tmp_path):
    run("create table t (d date primary key)", "insert into t values ('2024-01-01')")
    handed = Handed(dsn, tmp_path, ("public.t",), infinity="null")
    relation = handed.copy("public.t")
    run("insert into t values ('infinity')")
    assert 'column "d" of public.t (date) holds a value' in str(handed.stream(relation).error)
