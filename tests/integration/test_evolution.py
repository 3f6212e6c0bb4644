"""Tables that are altered while they are replicated: the lake goes on, or the table stops with the reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP
from airflow_provider_pgrepl.replication.lake.history.table import history_uri
from airflow_provider_pgrepl.replication.lake.schema_evolution import evolution
from airflow_provider_pgrepl.replication.lake.schema_evolution import evolution as evolving_table
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from tests.support.altered import Altered, T, done
from tests.support.courses import Courses
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

TABLE = (
    "create table t (id int primary key, a text, n int)",
    "insert into t values (1, 'x', 10), (2, 'y', 20)",
)


@pytest.fixture
def altered(dsn, tmp_path) -> Altered:
    execute(dsn, *TABLE)
    return Altered(dsn, tmp_path).take()


def test_a_table_goes_on_after_a_safe_change(dsn, tmp_path):
    changes = (
        "add column b int",
        "add column b text not null default 'it''s', add column c timestamp default '2020-01-01 00:00:00'",
        "add column b numeric(10,2) default 1.5, add column c int, add column d timestamptz, drop column a",
        "alter n type bigint",
        "alter a set not null, alter a type varchar",
    )
    courses = Courses(dsn, tmp_path, changes, TABLE).take()
    for ddl in changes:
        courses.execute(
            ddl,
            "insert into t values (3, 'z', 30)",
            "update t set n = 21 where id = 2",
            f"alter table t {ddl}",
            "update t set n = 11 where id = 1",
            "insert into t"
            " select (jsonb_populate_record(t, jsonb_build_object('id', 4))).* from t where id = 1",
            "delete from t where id = 3",
        )
    courses.follow_all()
    courses.assert_all_as_source()


def test_a_dropped_column_is_kept_and_null_from_then_on(altered, dsn):
    execute(
        dsn, "alter table t drop column a", "insert into t values (3, 30)", "update t set n = 21 where id = 2"
    )
    done(altered.follow())
    altered.assert_as_source()
    assert altered.values("id", "a") == [(1, "x"), (2, None), (3, None)]
    execute(dsn, "delete from t where id = 1", "insert into t values (5, 50)")
    done(altered.follow())
    altered.assert_as_source()


def test_a_transaction_changes_the_table_in_its_middle(altered, dsn):
    execute(
        dsn,
        "insert into t values (3, 'z', 30)",
        "begin; insert into t values (4, 'w', 40); update t set n = 12 where id = 1;"
        " delete from t where id = 2; alter table t drop column a, add column b real default 1.5;"
        " insert into t (id, n) values (5, 50); alter table t add column c int default 7;"
        " update t set b = 0.5, c = 8 where id = 3; insert into t (id, b) values (6, 0.25); commit",
        "begin; insert into t (id, b) values (7, 2.5); alter table t add column d numeric(5,2) default 3;"
        " update t set n = 13 where id in (1, 7); commit",
    )
    done(altered.follow())
    altered.assert_as_source()


@pytest.mark.thorough(
    "test_rows_without_key_are_counted_on, where a type becomes wider; property/test_widened_text"
)
def test_a_type_becomes_wider_in_the_middle_of_a_transaction(dsn, tmp_path):
    execute(
        dsn, "create table t (id int primary key, r real, n numeric(5,2))", "insert into t values (1, 0.5, 1)"
    )
    altered = Altered(dsn, tmp_path).take()
    execute(
        dsn,
        "begin; insert into t values (2, 1.1, 2.25); alter table t alter r type double precision,"
        " alter n type numeric(9,4), alter id type bigint; update t set r = 0.1 where id = 1;"
        " insert into t values (5000000000, 1e300, 0.0001); commit",
    )
    done(altered.follow())
    altered.assert_as_source()


STEPS = [
    "insert into t values (3, 'z', 30)",
    "alter table t add column b int default 7",
    "insert into t (id, b) values (4, 1)",
    "alter table t drop column a",
    "update t set b = 9 where id in (1, 4)",
    "begin; delete from t where id = 3; alter table t add column c text default 'd';"
    " insert into t (id, b) values (5, 5); commit",
    "alter table t add column d int",
    "update t set d = 1 where n = 10",
]


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.thorough(
    "test_a_table_goes_on_after_a_safe_change; test_a_transaction_changes_the_table_in_its_middle"
)
def test_changes_of_many_shapes_come_at_once_or_one_by_one(altered, dsn, at_once):
    for step in STEPS:
        execute(dsn, step)
        if not at_once:
            done(altered.follow())
    done(altered.follow())
    altered.assert_as_source()
    # An older version has the older columns.
    assert altered.rows(version=0).column_names[:3] == ["id", "a", "n"]
    assert altered.rows(version=0).num_rows == 2


@pytest.mark.thorough("unit/test_evolution: an evolved table says in which relation later changes begin")
def test_the_lake_table_says_what_it_is_for(altered, dsn):
    execute(dsn, "alter table t add column b int", "insert into t (id, b) values (3, 1)")
    result = done(altered.follow())
    assert result.relation is not None
    now = Relation.from_json(result.relation)
    assert [column.name for column in now.columns] == ["id", "a", "n", "b"]
    table = DeltaTable(altered.lake_path(T))
    assert table.transaction_version(RELATION_APP) == now.version
    table.optimize.compact()
    altered.relation = now
    execute(dsn, "begin; insert into t (id, b) values (9, 1); delete from t where id = 9; commit")
    assert done(altered.follow()).relation is None
    assert DeltaTable(altered.lake_path(T)).transaction_version(RELATION_APP) == now.version
    # A relation that is recorded no more, or not yet, is found by what the table says.
    altered.relation = replace(now, columns=now.columns[:3])
    execute(dsn, "insert into t (id, b) values (4, 2)")
    assert done(altered.follow()).relation is not None
    altered.assert_as_source()


def test_an_unsafe_change_stops_the_table_before_its_transaction(altered, dsn):
    execute(
        dsn,
        "insert into t values (3, 'z', 30)",
        "begin; insert into t values (4, 'w', 40); alter table t add column b int;"
        " insert into t values (5, 'v', 50, 1); alter table t rename n to m;"
        " insert into t values (6); commit",
        "insert into t values (7)",
    )
    result = altered.follow()
    assert result.error_kind == "DriftError"
    assert "renamed" in result.error
    assert result.error_lsn > 0
    assert altered.values("id") == [(1,), (2,), (3,)]
    again = altered.follow()
    assert (again.error, again.error_lsn) == (result.error, result.error_lsn)
    assert altered.values("id") == [(1,), (2,), (3,)]


class DiedError(BaseException):
    """The end of a process, at a place of the test's choice."""


@pytest.mark.parametrize(
    ("ddl", "history"),
    [("add column b int", False), ("add column b int default 7", True), ("alter n type bigint", True)],
)
@pytest.mark.thorough(
    "the same test, of a column with a default; wider types in test_a_table_goes_on_after_a_safe_change",
    "add column b int-False",
    "alter n type bigint-True",
)
def test_interrupted_evolution_is_completed_by_next_run(dsn, tmp_path, monkeypatch, ddl, history):
    execute(dsn, *TABLE)
    altered = Altered(dsn, tmp_path, history=history).take()
    execute(
        dsn,
        "insert into t values (3, 'z', 30)",
        f"begin; update t set n = 11 where id = 1; alter table t {ddl};"
        " update t set n = 12 where id = 1; commit",
        "delete from t where id = 2",
    )
    apply_changes = evolving_table.EvolvingTable._apply_changes

    def die(*_args):
        raise DiedError

    def apply_the_older(table, changes, relation):
        if relation.relfilenode != altered.relation.relfilenode or len(relation.columns) > 3:
            raise DiedError
        return apply_changes(table, changes, relation)

    for owner, name, instead in (
        (evolution.Evolution, "_evolve_history" if history else "_evolve_table", die),
        (evolution.Evolution, "_evolve_table", die),
        (evolving_table.EvolvingTable, "_apply_changes", apply_the_older),
        (evolving_table.EvolvingTable, "_settle", die),
    ):
        with monkeypatch.context() as patched, pytest.raises(DiedError):
            patched.setattr(owner, name, instead)
            altered.follow()
    done(altered.follow())
    altered.assert_as_source()
    if history:
        ended = altered.rows(history_uri(altered.pipeline.lake_root, TableName("public", "t")))
        assert sorted(zip(*(ended[name].to_pylist() for name in ("id", "n")), strict=True)) == [
            (1, 10),
            (2, 20),
        ]


@pytest.mark.thorough("test_interrupted_evolution_is_completed_by_next_run, with a history")
def test_a_history_keeps_the_versions_from_before(dsn, tmp_path):
    execute(dsn, *TABLE)
    altered = Altered(dsn, tmp_path, history=True).take()
    execute(
        dsn,
        "update t set a = 'x2' where id = 1",
        "alter table t add column b int default 7",
        "update t set a = 'x3' where id = 1",
        "alter table t drop column a",
        "update t set n = 25 where id = 2",
        "begin; update t set n = 26 where id = 2; alter table t add column c int default 8;"
        " delete from t; commit",
    )
    done(altered.follow())
    altered.assert_as_source()
    ended = altered.rows(history_uri(altered.pipeline.lake_root, TableName("public", "t")))
    names = ("id", "a", "n", "b", "c", "_pgrepl_to_op")
    found = sorted(zip(*(ended[name].to_pylist() for name in names), strict=True), key=repr)
    assert found == [
        (1, "x", 10, None, None, "U"),
        (1, "x2", 10, 7, None, "U"),
        (1, "x3", 10, 7, 8, "D"),
        (2, "y", 20, 7, None, "U"),
        (2, None, 25, 7, 8, "D"),
    ]


def test_rows_that_are_marked_as_deleted_follow_too(dsn, tmp_path):
    execute(dsn, "create table t (id int primary key, a text)", "insert into t values (1, 'x'), (2, 'y')")
    altered = Altered(dsn, tmp_path, deletes="soft").take()
    execute(
        dsn,
        "delete from t where id = 1",
        "begin; insert into t values (3, 'z'); alter table t add column b int default 7;"
        " delete from t where id = 2; commit",
        "insert into t values (2, 'again', 1)",
        "alter table t drop column a",
        "delete from t where id = 3",
    )
    done(altered.follow())
    assert altered.values("id", "b", "_pgrepl_deleted") == [(1, 7, True), (2, 1, False), (3, 7, True)]


def test_rows_without_key_are_counted_on(dsn, tmp_path):
    changes = (
        "add column b int default 7",
        "drop column a",
        "alter n type bigint",
        "add column b real default 1.5",
    )
    table = (
        "create table t (a text, n int)",
        "alter table t replica identity full",
        "insert into t values ('x', 1), ('x', 1), ('y', 2), (null, null)",
    )
    courses = Courses(dsn, tmp_path, changes, table).take()
    for ddl in changes:
        courses.execute(
            ddl,
            "insert into t values ('x', 1)",
            "begin; delete from t where ctid = (select min(ctid) from t where n = 1);"
            " insert into t values ('w', 5);"
            f" alter table t {ddl}; delete from t where n = 5; insert into t (n) values (1), (6); commit",
            "delete from t where ctid = (select min(ctid) from t where n = 1)",
            "update t set n = 3 where n = 2",
            "delete from t where n is null",
        )
    courses.follow_all()
    courses.assert_all_as_source()


def test_a_partitioned_table_follows_as_one(dsn, tmp_path):
    execute(dsn, *PARTITIONED)
    altered = Altered(dsn, tmp_path).take()
    execute(
        dsn,
        "insert into t values (2, 'z')",
        "alter table t add column b int default 7",
        "insert into t values (12, 'w', 1)",
        "alter table t drop column a",
        "update t set b = 8 where id in (1, 11)",
    )
    done(altered.follow())
    altered.assert_as_source()


PARTITIONED = (
    "create table t (id int primary key, a text) partition by range (id)",
    "create table low partition of t for values from (0) to (10)",
    "create table high partition of t for values from (10) to (20)",
    "insert into t values (1, 'x'), (11, 'y')",
)
SOME_ROWS = "insert into t values (2, 'z'), (12, 'z')"


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.thorough("the same test, at once; step by step in test_unlogged_tables", "False")
def test_a_partitioned_table_that_is_truncated_goes_on(dsn, tmp_path, at_once):
    """Its partitions have other files then, which also a TRUNCATE of single ones makes."""
    execute(dsn, *PARTITIONED)
    altered = Altered(dsn, tmp_path).take()
    for _ in range(2):
        for statement in (SOME_ROWS, "truncate t", "insert into t values (3, 'w')", "truncate t", SOME_ROWS):
            execute(dsn, "delete from t where id in (2, 12)", statement)
            if not at_once:
                done(altered.follow())
    done(altered.follow())
    altered.assert_as_source()


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.thorough("test_check_drift: a partition that was truncated by itself; test_partition_traces")
def test_a_partition_that_is_truncated_by_itself_stops_the_table(dsn, tmp_path, at_once):
    befores = {"by itself": "select 1", "after the whole": "truncate t"}
    courses = Courses(dsn, tmp_path, befores, PARTITIONED).take()
    steps = (None, "insert into t values (3, 'w'), (13, 'w')", "truncate low")
    for statement in steps:
        for course, before in befores.items():
            courses.execute(course, statement or before)
        if not at_once:
            courses.follow_all()
    courses.execute_in_all("insert into t values (4, 'v')")
    for course, found in courses.follow().items():
        assert f"{courses.schemas[course]}.low was truncated by itself" in found.error, course


def test_a_partition_that_goes_stops_the_table(dsn, tmp_path):
    ways = ("alter table t detach partition high", "drop table high")
    courses = Courses(dsn, tmp_path, ways, PARTITIONED).take()
    for ddl in ways:
        courses.execute(ddl, SOME_ROWS, ddl, "insert into t values (3, 'w')")
    for ddl, found in courses.follow().items():
        assert f"partition {courses.schemas[ddl]}.high was detached or dropped" in found.error, ddl


def test_a_rewrite_that_clears_the_default_of_older_rows_is_no_change_of_values(dsn, tmp_path):
    """It moves the xmin of the column that was added, as ALTER TYPE would."""
    rewrites = ("vacuum full t", "alter table t alter n type bigint", "cluster t using t_pkey")
    courses = Courses(dsn, tmp_path, rewrites, TABLE).take()
    courses.execute_in_all("alter table t add b int default 7", "insert into t values (3, 'z', 30)")
    courses.follow_all()
    for ddl in rewrites:
        courses.execute(ddl, ddl, "insert into t values (4, 'w', 40)")
    courses.follow_all()
    courses.assert_all_as_source()


def test_a_rewrite_that_changes_values_stops_the_table_whatever_default_there_is(altered, dsn):
    execute(dsn, "alter table t add b int default 7", "insert into t values (3, 'z', 30)")
    done(altered.follow())
    execute(dsn, "alter table t alter b type int using b + 1", "insert into t values (4, 'w', 40)")
    assert "column b altered" in altered.follow().error


def test_a_table_that_leaves_out_added_columns(dsn, tmp_path):
    execute(dsn, "create table t (id int primary key, a text)", "insert into t values (1, 'x')")
    altered = Altered(dsn, tmp_path, on_drift="ignore").take()
    execute(
        dsn,
        "alter table t add column b int default 7",
        "insert into t values (2, 'y', 8)",
        "update t set b = 1",
    )
    done(altered.follow())
    assert altered.values("id", "a") == [(1, "x"), (2, "y")]
    assert "b" not in altered.rows().column_names


def test_a_table_whose_policy_is_to_stop(dsn, tmp_path):
    execute(dsn, "create table t (id int primary key, a text)")
    altered = Altered(dsn, tmp_path, on_drift="error").take()
    execute(
        dsn,
        "insert into t values (1, 'x')",
        "alter table t add column b int",
        "insert into t values (2, 'y', 8)",
    )
    result = altered.follow()
    assert "b was added" in result.error
    assert altered.values("id") == [(1,)]
    altered.configure(on_drift="evolve")
    done(altered.follow())
    altered.assert_as_source()


def test_excluded_and_typed_columns_stay_what_they_are(dsn, tmp_path):
    execute(
        dsn, "create table t (id int primary key, a text, n numeric)", "insert into t values (1, 'x', 1.5)"
    )
    altered = Altered(dsn, tmp_path, exclude_columns=(f"{T}.a",), types={f"{T}.n": "decimal(20,4)"}).take()
    execute(dsn, "alter table t add column b int default 7", "insert into t values (2, 'y', 2.25, 1)")
    done(altered.follow())
    assert [(i, str(n), b) for i, n, b in altered.values("id", "n", "b")] == [
        (1, "1.5000", 7),
        (2, "2.2500", 1),
    ]
    assert "a" not in altered.rows().column_names


@pytest.mark.thorough("test_foreign_writes: rows of another program are found")
def test_rows_of_somebody_else_stop_the_table(altered, dsn):
    execute(dsn, "insert into t values (3, 'z', 30)")
    done(altered.follow())
    rows = altered.rows().slice(0, 1)
    write_deltalake(altered.lake_path(T), rows, mode="append")
    execute(dsn, "insert into t values (4, 'z', 30)")
    result = altered.follow()
    assert result.error_kind == "LakeChangedError"
    assert "version 2 of the lake table was not written by this pipeline (operation WRITE)" in result.error


def test_maintenance_of_somebody_else_does_no_harm(altered, dsn):
    for number in (3, 4, 5):
        execute(dsn, f"insert into t values ({number}, 'z', 30)")
        done(altered.follow())
    table = DeltaTable(altered.lake_path(T))
    table.optimize.compact()
    table.vacuum(retention_hours=1000)
    execute(dsn, "delete from t where id = 4")
    done(altered.follow())
    altered.assert_as_source()
