"""`pgrepl snapshot --adopt`: lake tables that another program has written become the pipeline's."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Transaction, write_deltalake

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.lake.verify import resync
from airflow_provider_pgrepl.replication.lake.verify.adoption import Adoption
from airflow_provider_pgrepl.replication.lake.verify.repair import TableRepair
from tests.support.in_process import EndedAtOnce, InProcess
from tests.support.received import EAGER
from tests.support.replicated import execute, repeating

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS = 3000
_MICROSECONDS = 1_767_225_600_000_000
"""The start of 2026 since 1970."""


def _write_by_spark(spark: SparkSession, path: str) -> None:
    """Write the rows of table `t` as a bulk load by Spark would, in four files."""
    spark.sql(
        f"create table delta.`{path}` using delta as select cast(id as int) as id, id * 7 as big,"
        " concat('v', id) as v, cast(id / 4 as decimal(14, 6)) as price, id / 8 as share,"
        f" timestamp_micros({_MICROSECONDS} + id * 1000001) as at,"
        " date_add(date'2026-01-01', cast(id % 300 as int)) as day, id % 3 = 0 as even,"
        " cast(concat('b', id) as binary) as raw"
        f" from range(1, {_ROWS + 1}, 1, 4)"
    )


_T = (
    "create table t (id int primary key, big bigint, v text, price numeric(14,6), share float8,"
    " at timestamptz, day date, even bool, raw bytea)",
    "insert into t select g, g * 7, 'v' || g, g / 4.0, g / 8.0,"
    f" timestamptz '2026-01-01 00:00:00Z' + g * interval '1.000001 seconds', date '2026-01-01' + g % 300,"
    f" g % 3 = 0, ('b' || g)::bytea from generate_series(1, {_ROWS}) g",
)


def _files(pipeline: InProcess, table: str) -> set[str]:
    return set(live_files(open_table(pipeline.lake_path(table))))


def test_tables_of_other_programs_are_compared_and_only_rows_that_differ_are_replaced(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    """Adopted at the first set-up, while the tables are written. A table without a lake table is copied."""
    execute(
        dsn,
        *_T,
        "create table heap (a int, b text)",
        "alter table heap replica identity full",
        f"insert into heap select g % 7, 'same' from generate_series(1, {_ROWS}) g",
        f"insert into heap select g % 7, 'steady' from generate_series(1, {_ROWS}) g",
        "create table fresh (id int primary key, n int); insert into fresh values (1, 1)",
    )
    tables = ("public.t", "public.heap", "public.fresh")
    pipeline = InProcess(spark, dsn, tmp_path, tables)
    _write_by_spark(spark, pipeline.lake_path("public.t"))
    for text in ("same", "steady"):
        heap = {"a": pa.array([g % 7 for g in range(1, _ROWS + 1)], pa.int32()), "b": [text] * _ROWS}
        write_deltalake(pipeline.lake_path("public.heap"), pa.table(heap), mode="append")
    loaded = {table: _files(pipeline, table) for table in tables[:2]}
    execute(
        dsn,
        "update t set v = 'changed' where id = 5; delete from t where id = 6",
        f"insert into t (id, v) values ({_ROWS + 1}, 'new')",
        "delete from heap where ctid = (select min(ctid) from heap); insert into heap values (1, 'other')",
    )
    assert pipeline.run("snapshot") == 78
    states = pipeline.states()
    assert "--adopt" in states["public.t"].hint
    assert {table for table in tables if states[table].state != "errored"} == {"public.fresh"}
    assert {table: _files(pipeline, table) for table in tables[:2]} == loaded

    def change(turn: int) -> None:
        execute(
            dsn,
            f"update t set big = -1 where id = {turn % 100 + 1}",
            "delete from heap where ctid = (select min(ctid) from heap)",
            f"insert into heap values ({turn}, 'other'), ({turn}, 'other')",
            f"insert into fresh values ({-turn}, 0)",
        )

    with repeating(change):
        assert pipeline.run("snapshot", "--adopt") == 0, pipeline.log_tail()
        kept = {table: _files(pipeline, table) & loaded[table] for table in loaded}
        with pipeline.replicating(EAGER):
            pipeline.wait_for_points(2, *tables)
    assert read_epoch(pipeline.changelog).epoch == 1
    assert all(kept.values()), "no file of the bulk load is left"
    pipeline.catch_up()
    pipeline.assert_equal(*tables)
    lake = pipeline.lake_rows("public.t")
    positions = dict(zip(lake["id"].to_pylist(), lake["_pgrepl_commit_lsn"].to_pylist(), strict=True))
    assert positions[_ROWS] is None
    assert positions[5] is not None
    # They are the pipeline's now: a resync compares them, a resnapshot replaces them, a teardown drops them.
    assert pipeline.run("snapshot", "--resync", "public.t,public.heap") == 0, pipeline.log_tail()
    assert "copied, not compared" not in pipeline.log.read_text()
    pipeline.resnapshot("public.t")
    pipeline.assert_equal(*tables)
    teardown(Access(pipeline.pipeline, dsn, dsn), drop_lake=True)
    assert not any(Path(pipeline.lake_path(table), "_delta_log").exists() for table in tables)


@pytest.mark.thorough("test_resync, and the test above: most tables are refused by what a resync refuses")
def test_table_that_differs_too_much_is_not_adopted_and_stays_as_it_is(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("lacks", "typed", "strict", "mapped", "much", "past", "others", "split")
    execute(dsn, *(f"create table {name} (id int primary key, n int)" for name in names))
    execute(dsn, *(f"insert into {name} select g, g from generate_series(1, 200) g" for name in names))
    execute(dsn, "create table fine (id int primary key, n int); insert into fine values (1, 1)")
    others = InProcess(spark, dsn, tmp_path, ("public.others",), lake=str(tmp_path / "others"), name="others")
    others.snapshot()
    tables = tuple(f"public.{name}" for name in (*names, "fine"))
    options = {"public.past": {"history": True}, "public.split": {"partition_by": "n"}}
    pipeline = InProcess(spark, dsn, tmp_path, tables, per_table=options)
    paths = {name: Path(pipeline.lake_path(f"public.{name}")) for name in (*names, "fine")}
    rows = {"id": pa.array(range(1, 201), pa.int32()), "n": pa.array(range(1, 201), pa.int32())}
    whole = pa.table(rows)
    write_deltalake(paths["lacks"], whole.select(["id"]))
    write_deltalake(paths["typed"], whole.set_column(1, "n", whole["n"].cast(pa.int64())))
    strict = pa.schema([pa.field("id", pa.int32(), nullable=False), pa.field("n", pa.int32())])
    write_deltalake(paths["strict"], whole.cast(strict))
    spark.sql(
        f"create table delta.`{paths['mapped']}` using delta"
        " tblproperties ('delta.columnMapping.mode' = 'name')"
        " as select cast(id as int) as id, cast(id as int) as n from range(1, 201)"
    )
    write_deltalake(paths["much"], whole.set_column(1, "n", pa.array([0] * 200, pa.int32())))
    write_deltalake(paths["past"], whole)
    write_deltalake(paths["split"], whole, partition_by=["n"])
    shutil.copytree(others.lake_path("public.others"), paths["others"])
    write_deltalake(
        paths["fine"], pa.table({"id": pa.array([1], pa.int32()), "n": pa.array([2], pa.int32())})
    )
    before = {name: sorted(paths[name].rglob("*")) for name in names}
    monkeypatch.setattr(resync, "FEW_ROWS", 50)

    assert pipeline.run("snapshot", "--adopt") == 78
    states = pipeline.states()
    reasons = {name: states[f"public.{name}"].reason for name in names}
    assert 'other columns than this pipeline gives it: "n"' in reasons["lacks"]
    assert 'other columns than this pipeline gives it: "n"' in reasons["typed"]
    assert "NOT NULL of column id" in reasons["strict"]
    assert "delta.columnMapping.mode" in reasons["mapped"]
    assert "200 rows differ from the 200 rows of the source" in reasons["much"]
    assert "it has a history" in reasons["past"]
    assert '"_pgrepl_partition"' in reasons["split"]
    assert "a folder that this pipeline has not written" in reasons["others"]
    assert "--adopt" not in states["public.others"].hint
    assert {name: sorted(paths[name].rglob("*")) for name in names} == before
    assert all("not adopted" in reasons[name] for name in names if name != "others")
    pipeline.assert_equal("public.fine")

    # The cause is removed for one, which is named then; an adopted one is named too, and left alone.
    write_deltalake(paths["typed"], whole, mode="overwrite", schema_mode="overwrite")
    assert pipeline.run("snapshot", "--adopt", "public.typed,public.fine") == 0, pipeline.log_tail()
    assert "table public.fine is replicated already" in pipeline.log_tail()
    assert re.search(r"public.typed equals the source", pipeline.log_tail())
    execute(dsn, "delete from typed where id = 5", "insert into fine values (2, 2)")
    assert pipeline.run("replicate", "--until", "caught-up") == 78
    pipeline.assert_equal("public.typed", "public.fine")


@pytest.mark.thorough("test_resync: the same commit is raced")
def test_interrupted_adoption_is_run_again(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program may have written the table between the comparison and the commit, too."""
    execute(dsn, "create table t (id int primary key, n int); insert into t values (1, 1), (2, 2)")
    pipeline = InProcess(spark, dsn, tmp_path, ("public.t",))
    path, commit = pipeline.lake_path("public.t"), TableRepair.commit_as_copy
    kind = pa.schema([("id", pa.int32()), ("n", pa.int32())])
    write_deltalake(path, pa.Table.from_pylist([{"id": 1, "n": 1}], kind))

    def killed(*_: object) -> None:
        raise EndedAtOnce

    with monkeypatch.context() as patched:
        patched.setattr(TableRepair, "commit_as_copy", killed)
        assert pipeline.run("snapshot", "--adopt") == 75
    assert DeltaTable(path).version() == 1
    prepare, turns = Adoption._add_own_columns, []

    def write_once(step: str) -> None:
        if step not in turns:
            turns.append(step)
            # With an app ID of its own, as Spark Streaming has.
            own = CommitProperties(app_transactions=[Transaction("loader", len(turns))])
            more = pa.Table.from_pylist([{"id": len(turns) + 2, "n": 3}], kind)
            write_deltalake(path, more, mode="append", schema_mode="merge", commit_properties=own)

    def raced_first(*arguments: Any) -> None:
        write_once("before the columns are added")
        prepare(*arguments)

    def raced_then(*arguments: Any) -> None:
        write_once("before the rows are replaced")
        commit(*arguments)

    monkeypatch.setattr(Adoption, "_add_own_columns", raced_first)
    monkeypatch.setattr(TableRepair, "commit_as_copy", raced_then)
    with monkeypatch.context() as patched:
        patched.setattr(SnapshotCopy, "_conclude", killed)
        assert pipeline.run("snapshot", "--adopt") == 75
    assert len(turns) == 2
    kept = _files(pipeline, "public.t")
    assert pipeline.run("snapshot", "--adopt") == 0, pipeline.log_tail()
    assert _files(pipeline, "public.t") == kept
    pipeline.catch_up()
    pipeline.assert_equal("public.t")
