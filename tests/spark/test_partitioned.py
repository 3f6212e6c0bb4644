"""Partitioned lake tables through the apps: the source's rows, whatever partitions they are in or move to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_as_of, as_of
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.conftest import closing_connection
from tests.support.in_process import InProcess
from tests.support.partitioned import check_partitions
from tests.support.replicated import execute

ODD = "array[null, '', 'a/b=c%2F', E'two\\nlines', 'ü中文', '..', '%', ' ', repeat('中', 40), 'it''s']"
NAMES = {
    "odd": "id, p, doc",
    "large": "id, p, doc",
    "daily": "id, at::text, doc",
    "copies": "id, p, doc",
    "kept": "id, p, doc",
}
BY = {"odd": "p", "large": "doc", "daily": "day(at)", "copies": "p", "kept": "p"}
TABLES = tuple(f"public.{name}" for name in NAMES)
SETUP = (
    *(f"create table {name}(id int primary key, p text, doc text)" for name in ("odd", "large", "kept")),
    "create table daily(id int, at timestamptz, doc text, primary key (id, at)) partition by range (at)",
    "create table daily_1 partition of daily for values from (minvalue) to ('2026-01-02')",
    "create table daily_2 partition of daily for values from ('2026-01-02') to (maxvalue)",
    "create table copies(id int, p text, doc text)",
    "alter table copies replica identity full",
    *(f"alter table {name} alter doc set storage external" for name in NAMES if name != "daily"),
    f"create function odd(n int) returns text language sql immutable as $$ select ({ODD})[1 + n % 10] $$",
    *(
        f"insert into {name} select g, odd(g), repeat(md5(g::text), 100) from generate_series(1, 200) g"
        for name in NAMES
        if name != "daily"
    ),
    "insert into copies select * from copies where id <= 50",
    "insert into daily select g, '2026-01-01'::timestamptz + g * interval '30 minutes', 'x'"
    " from generate_series(1, 200) g",
)
CHANGES = (
    *(f"update {name} set p = odd(id + 1) where id % 7 = 0" for name in NAMES if name != "daily"),
    *(f"update {name} set doc = doc || 'y' where id % 11 = 0" for name in NAMES),
    *(f"update {name} set p = p where id % 5 = 0" for name in ("odd", "large", "kept", "copies")),
    *(f"update {name} set id = id + 1000 where id % 13 = 0" for name in NAMES),
    *(f"delete from {name} where id % 17 = 0" for name in NAMES),
    "update daily set at = at + interval '3 days' where id % 19 = 0",
)


def rows(replicated: InProcess, name: str, dsn: str) -> tuple[Counter[Any], Counter[Any]]:
    """Return the lake's rows, on which Spark and DataFusion must agree, and the source's."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("set timezone to 'UTC'")
        cursor.execute(f"select {NAMES[name]} from {name}")
        source = Counter(cursor.fetchall())
    there = " where not _pgrepl_deleted" if name == "kept" else ""
    table = open_table(replicated.lake_path(f"public.{name}"))
    lake = pa.table(QueryBuilder().register("t", table).execute(f"select * from t{there}").read_all())
    frame = replicated.spark.read.format("delta").load(replicated.lake_path(f"public.{name}"))
    frame = frame.where("not _pgrepl_deleted") if name == "kept" else frame
    columns = [column.removesuffix("::text") for column in NAMES[name].split(", ")]
    by_spark = frame.selectExpr(*columns, PARTITION).toArrow()
    found, other = (counted(table.select([*columns, PARTITION])) for table in (lake, by_spark))
    assert found == other
    return Counter(row[:-1] for row in found.elements()), source


def counted(table: pa.Table) -> Counter[Any]:
    values = (row.values() for row in table.to_pylist())
    return Counter(
        tuple(f"{v:%Y-%m-%d %H:%M:%S}+00" if hasattr(v, "year") else v for v in row) for row in values
    )


def check(replicated: InProcess, dsn: str) -> None:
    states = replicated.states()
    for name in NAMES:
        found, source = rows(replicated, name, dsn)
        assert found == source, name
        record = states[f"public.{name}"]
        options = replicated.pipeline.options(record.table)
        assert len(check_partitions(replicated.lake_path(f"public.{name}"), record.relation, options)) > 3


@pytest.mark.thorough("unit/test_partitioned_tables, and the next test")
def test_a_partitioned_table_holds_the_rows_of_the_source(spark, dsn: str, tmp_path: Path) -> None:
    execute(dsn, *SETUP)
    policies = {f"public.{name}": {"partition_by": by} for name, by in BY.items()}
    policies["public.kept"]["deletes"] = "soft"
    replicated = InProcess(spark, dsn, tmp_path, TABLES, per_table=policies, snapshot_range_bytes=16384)
    replicated.snapshot()
    check(replicated, dsn)
    for merge in ("rewrite", "merge_on_read", "rewrite"):
        replicated.configure(merge=merge)
        execute(dsn, *CHANGES)
        replicated.catch_up()
    check(replicated, dsn)
    for table in ("public.odd", "public.copies"):
        lake = as_of(spark, replicated.pipeline)
        assert counted(lake.table(table).toArrow()) == counted(arrow_as_of(replicated.pipeline, table))
    execute(
        dsn,
        "begin; truncate odd, large, copies; insert into odd select g, odd(g), 'z'"
        " from generate_series(1, 20) g; insert into large select * from odd;"
        " insert into copies select id, p, p from large; update large set doc = id; commit",
    )
    replicated.catch_up()
    for name in ("odd", "large", "copies"):
        found, source = rows(replicated, name, dsn)
        assert found == source, name


@pytest.mark.thorough("unit/test_partitioned_tables")
def test_another_choice_takes_effect_with_a_resnapshot_and_a_lost_column_stops_its_table_alone(
    spark, dsn: str, tmp_path: Path
) -> None:
    execute(dsn, *(f"create table {name}(id int primary key, p text, q text)" for name in ("one", "two")))
    execute(dsn, *(f"insert into {name} values (1, 'a', 'x'), (2, 'b', 'y')" for name in ("one", "two")))
    replicated = InProcess(spark, dsn, tmp_path, ("public.one", "public.two"))
    replicated.snapshot()
    replicated.configure(per_table={"public.one": {"partition_by": "p"}})
    execute(dsn, "update one set q = 'z' where id = 1", "insert into two values (3, 'c', 'z')")
    replicated.catch_up()
    assert (
        "table public.one: partition_by changed in the pipeline file; takes effect when"
        in replicated.log_tail()
    )
    assert open_table(replicated.lake_path("public.one")).metadata().partition_columns == []
    before = as_of(spark, replicated.pipeline).lsn
    replicated.resnapshot("public.one")
    execute(dsn, "update one set p = 'c' where id = 2")
    replicated.catch_up()
    by_arrow = arrow_as_of(replicated.pipeline, "public.one", lsn=before)
    by_spark = as_of(spark, replicated.pipeline, lsn=before).table("public.one").toArrow()
    assert counted(by_arrow.select(["id", "p", "q"])) == counted(by_spark.select(["id", "p", "q"]))
    assert sorted(by_arrow["p"].to_pylist()) == ["a", "b"]
    one = replicated.states()["public.one"]
    options = replicated.pipeline.options(one.table)
    assert check_partitions(replicated.lake_path("public.one"), one.relation, options) == {"a": 1, "c": 1}
    execute(
        dsn,
        "alter table one drop p",
        "insert into one values (4, 'w')",
        "insert into two values (4, 'd', 'w')",
    )
    assert replicated.run("replicate", "--until", "caught-up") == process.WILL_NOT_HELP
    one = replicated.states()["public.one"]
    assert one.state is TableState.ERRORED
    assert "partition_by names column p, which was dropped: change partition_by of the table" in one.reason
    assert "--tables 'public.one'" in one.hint
    assert pa.table(replicated.lake_rows("public.two")).num_rows == 4
    assert replicated.run("snapshot", "--tables", "public.one") != 0
    assert "partition_by names column p, which the table does not have" in replicated.log_tail()
    replicated.configure(per_table={"public.one": {"partition_by": "q"}})
    replicated.resnapshot("public.one")
    replicated.catch_up()
    one = replicated.states()["public.one"]
    found = check_partitions(
        replicated.lake_path("public.one"), one.relation, replicated.pipeline.options(one.table)
    )
    assert found == {"z": 1, "y": 1, "w": 1}
