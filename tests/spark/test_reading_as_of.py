"""lake/time_travel/as_of.py through Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.errors import ConfigError, LakeTableError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow, consistent_read
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import (
    arrow_as_of,
    arrow_view_as_of,
    as_of,
    create_views,
)
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from tests.integration.test_reading_as_of import SCHEMA, TABLES, Source, plain, rows_of
from tests.support.changes import column
from tests.support.in_process import InProcess
from tests.support.landed import Landed
from tests.support.model import Change
from tests.support.unserved import UnservedLake, numbered

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.mark.thorough("test_views_show_every_table_at_one_point; integration/test_reading_as_of, each moment")
def test_spark_shows_at_each_moment_what_the_source_did(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, TABLES)
    replicated.begin()
    replicated.apply()
    source = Source(pg, seed=11)
    for _ in range(15):
        source.transaction()
    replicated.receive()
    assert [result.error for result in replicated.apply()] == [None] * len(TABLES)
    for _ in range(12):
        source.transaction()
    source.look()
    replicated.receive()
    (lsn, _, tables), *_ = source.seen
    lake = as_of(spark, replicated.pipeline, lsn=str(lsn))
    for table, rows in tables.items():
        found = lake.table(table).toArrow()
        assert plain(rows_of(found)) == plain(rows), table
        same = arrow_view_as_of(replicated.pipeline, lsn=str(lsn)).table(table)
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, same.to_pylist()))


def test_views_show_every_table_at_one_point(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    execute = pg.cursor().execute
    execute("create schema shop; create table item (id int primary key, about jsonb)")
    execute("create table shop.orders (id int primary key, item int)")
    replicated = Landed(dsn, tmp_path, ("public.item", "shop.orders"))
    replicated.begin()
    execute(
        """insert into item values (1, '{"size": {"cm": 12.50}}'); insert into shop.orders values (1, 1)"""
    )
    replicated.receive()
    replicated.apply()
    execute("insert into shop.orders values (2, 1)")
    replicated.receive()
    views = create_views(spark, replicated.pipeline, variant=True)
    assert views == {"public.item": "item", "shop.orders": "shop_orders"}
    sql = (
        "select about:size.cm::decimal(5,2), count(*) from item"
        " join shop_orders on shop_orders.item = item.id group by 1"
    )
    assert [tuple(row) for row in spark.sql(sql).collect()] == [(Decimal("12.50"), 1)]
    newest = create_views(spark, replicated.pipeline, lsn=replicated.durable_lsn, prefix="now_")
    assert spark.sql(f"select id from {newest['shop.orders']}").count() == 2
    with pytest.raises(ConfigError, match=r"no json or jsonb column of a table here: public\.item\.id"):
        create_views(spark, replicated.pipeline, variant=["public.item.id"])


@pytest.mark.thorough("test_views_show_every_table_at_one_point")
def test_history_through_spark_is_that_of_arrow(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    execute = pg.cursor().execute
    execute("create table t (id int primary key, v text)")
    replicated = Landed(dsn, tmp_path, ("public.t",), history=True)
    replicated.begin()
    execute("insert into t values (1, 'a'), (2, 'b')")
    execute("update t set v = 'c' where id = 1")
    replicated.receive()
    replicated.apply()
    execute("delete from t where id = 1")
    execute("update t set v = 'd'")
    replicated.receive()
    found = as_of(spark, replicated.pipeline).history("public.t").toArrow()
    same = arrow_view_as_of(replicated.pipeline).history("public.t")
    assert found.num_rows == 4
    assert sorted(map(repr, found.select(same.column_names).to_pylist())) == sorted(
        map(repr, same.to_pylist())
    )
    at_point = consistent_read(spark, replicated.pipeline).history("public.t")
    assert at_point.where("_pgrepl_to_lsn is null").count() == 2


@pytest.mark.thorough("integration/test_reading_across_drift")
def test_spark_reads_across_safe_ddl_what_arrow_reads(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    execute = pg.cursor().execute
    execute("create table t (id int primary key, v text, n int); create table heap (a int, b text)")
    execute("alter table heap replica identity full")
    tables = ("public.t", "public.heap")
    landed = Landed(dsn, tmp_path, tables, per_table={"public.t": {"history": True}})
    landed.begin()
    steps = (
        "insert into t values (1, 'a', 1), (2, 'b', 2), (3, 'c', 3);"
        " insert into heap values (1, 'x'), (1, 'x')",
        "alter table t alter n type bigint; alter table heap add at timestamp default '2026-01-01'",
        "update t set n = 1::bigint << 40 where id = 1; delete from heap where ctid = '(0,1)'",
        "alter table t drop v",
        "begin; update t set n = 5 where id = 2; alter table t add w numeric(5,2) default 1.5;"
        " insert into t values (4, 4, 0.25); delete from t where id = 3; commit",
    )
    for number, step in enumerate(steps):
        execute(step)
        if not step.startswith("alter"):
            landed.receive()
        if number == 0:
            landed.apply()
    lake, same = as_of(spark, landed.pipeline), arrow_view_as_of(landed.pipeline)
    for found, known in (
        *((lake.table(name), same.table(name)) for name in tables),
        (lake.history("public.t"), same.history("public.t")),
    ):
        rows = found.toArrow()
        assert rows.column_names == known.column_names
        assert sorted(map(repr, rows.to_pylist())) == sorted(map(repr, known.to_pylist()))
    assert sorted(same.table("public.t").select(["id", "v", "n", "w"]).to_pylist(), key=str) == [
        {"id": 1, "v": "a", "n": 1 << 40, "w": Decimal("1.50")},
        {"id": 2, "v": None, "n": 5, "w": Decimal("1.50")},
        {"id": 4, "v": None, "n": 4, "w": Decimal("0.25")},
    ]
    assert len(same.history("public.t")) == 6


def test_received_changes_are_readable_before_merge(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute("create table t (id int primary key, v text)")
    pg.cursor().execute("insert into t values (1, 'a'), (2, 'b')")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    assert replicated.run("snapshot") == 0, replicated.log_tail()
    copied = datetime.now(UTC)
    pg.cursor().execute("update t set v = 'c' where id = 2")
    pg.cursor().execute("insert into t values (3, 'd')")
    replicated.receive()
    found = arrow_as_of(replicated.pipeline, "public.t").sort_by("id")
    assert found["v"].to_pylist() == ["a", "c", "d"]
    before = arrow_as_of(replicated.pipeline, "public.t", timestamp=copied).sort_by("id")
    assert before["v"].to_pylist() == ["a", "b"]


def test_a_moment_between_the_copy_and_the_first_batch_can_be_read_for_as_long_as_points_are_kept(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute("create table t (id int primary key, v text)")
    pg.cursor().execute("insert into t values (1, 'a')")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",), history=True)
    assert replicated.run("snapshot") == 0, replicated.log_tail()
    (beginning,) = ConsistentPoints(replicated.pipeline.lake_root).all()
    assert consistent_arrow(replicated.pipeline, beginning.lsn).table("public.t")["v"].to_pylist() == ["a"]
    pg.cursor().execute("update t set v = 'b'")
    between = wal_lsn(pg)
    pg.cursor().execute("update t set v = 'c'")
    assert replicated.run("replicate", "--until", "caught-up") == 0, replicated.log_tail()
    seen = {lsn: arrow_as_of(replicated.pipeline, "public.t", lsn=lsn) for lsn in (beginning.lsn, between)}
    assert [table["v"].to_pylist() for table in seen.values()] == [["a"], ["b"]]


@pytest.mark.parametrize(("was", "now"), [("soft", "hard"), ("hard", "soft")])
@pytest.mark.thorough("the same test, of soft deletes", "hard-soft")
def test_spark_reads_a_version_by_the_columns_that_it_has(
    spark: SparkSession, tmp_path: Path, was: str, now: str
) -> None:
    lake = UnservedLake(tmp_path, numbered(column("id", "bigint", key=True), column("v")), deletes=was)
    lake.apply(*(Change("I", new=(number, "a"), commit_lsn=110) for number in "123"))
    lake.apply(Change("D", old=("1", None), commit_lsn=120))
    lake.receive(
        Change("D", old=("2", None), commit_lsn=130),
        Change("U", new=("3", "b"), commit_lsn=140),
        Change("T", new=("0",), commit_lsn=150),
        Change("I", new=("1", "c"), commit_lsn=160),
    )
    lake.configure(deletes=now)
    for lsn, count in ((125, 1), (145, 2), (150, 3), (160, 2)):
        found = as_of(spark, lake.pipeline, lsn=lsn).table("public.t").toArrow()
        same = lake.read(lsn)
        assert found.column_names == same.column_names
        assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, same.to_pylist()))
        if was == "soft":
            assert found["_pgrepl_deleted"].to_pylist().count(True) == count


def test_spark_reads_rows_without_key_whose_columns_have_dots_in_their_names(
    spark: SparkSession, tmp_path: Path
) -> None:
    of = numbered(column("item.no", "bigint"), column("a `b`.c"), identity="f")
    lake = UnservedLake(tmp_path, of)
    lake.apply(*(Change("I", new=(number, "a"), commit_lsn=110) for number in "112"))
    lake.receive(Change("D", old=("1", "a"), commit_lsn=120), Change("I", new=("3", "b"), commit_lsn=130))
    found = as_of(spark, lake.pipeline, lsn=130).table("public.t").toArrow()
    assert sorted(found["item.no"].to_pylist()) == [1, 2, 3]
    assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, lake.read(130).to_pylist()))


@pytest.mark.parametrize("of", ["U", "D"])
def test_spark_refuses_a_version_that_has_a_changed_row_twice(
    spark: SparkSession, tmp_path: Path, of: str
) -> None:
    lake = UnservedLake(tmp_path, numbered(column("id", "bigint", key=True), column("v")))
    lake.apply(Change("I", new=("1", "a"), commit_lsn=110))
    write_deltalake(lake.uri, pa.table(DeltaTable(lake.uri).to_pyarrow_table()), mode="append")
    lake.note_point(115)
    row = {"new": ("1", None), "unchanged": (1,)} if of == "U" else {"old": ("1", None)}
    lake.receive(Change(of, commit_lsn=120, **row))
    with pytest.raises(LakeTableError, match="has it twice"):
        lake.read(120)
    with pytest.raises(Exception, match="has it twice"):
        as_of(spark, lake.pipeline, lsn=120).table("public.t").toArrow()
