"""`pgrepl resync`: tables are compared with the source, and repaired, instead of copied."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.app.copy_states import CopyStates
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.delta.live_files import COMMIT_METADATA, app_version
from airflow_provider_pgrepl.replication.lake.delta.table import RELATION_APP, app_id, open_table
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.lake.merge.slice_commit import SliceCommit
from airflow_provider_pgrepl.replication.lake.snapshot.copy_report import TableCopy
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.lake.verify import resync
from airflow_provider_pgrepl.replication.lake.verify.comparison import LakeSide
from airflow_provider_pgrepl.replication.lake.verify.repair import TableRepair
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.state.reports import CopyProgress
from tests.support.in_process import EndedAtOnce, InProcess
from tests.support.received import EAGER
from tests.support.replicated import execute, repeating, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS = 3000


def _drop_slot(pipeline: InProcess) -> None:
    execute(pipeline.dsn, f"select pg_drop_replication_slot('{pipeline.pipeline.slot}')")


def _ids(pipeline: InProcess, table: str) -> dict[str, set[int]]:
    """Return the ids in each data file of a lake table."""
    rows = FileRows(open_table(pipeline.lake_path(table)))
    return {
        file.path: {key for part in rows.all_of(number) for key in part["id"].to_pylist()}
        for number, file in enumerate(rows.files)
    }


def _kinds(pipeline: InProcess, table: str) -> list[str]:
    """Return the kinds of the commits that set rows, the last one first."""
    commits = DeltaTable(pipeline.lake_path(table)).history()
    abouts: list[dict[str, Any]] = [json.loads(commit.get(COMMIT_METADATA) or "{}") for commit in commits]
    kinds = [about.get("kind") for about in abouts]
    return [kind for kind in kinds if kind not in (None, "bounds", "comments")]


def _kind(pipeline: InProcess, table: str) -> str:
    return _kinds(pipeline, table)[0]


def test_lost_slot_costs_only_the_rows_that_changed_and_streaming_goes_on(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    """Rows are updated, moved to other keys, deleted and inserted all the time, also while tables are
    compared."""
    text = "repeat('v' || g, 50)"
    execute(
        dsn,
        "create table t (id int primary key, n int, v text, large text, part text)",
        "alter table t alter large set storage external",
        f"insert into t select g, g % 5, {text}, repeat('w', 3000), case when g > 200 then 'cold' else 'hot'"
        f" end from generate_series(1, {_ROWS}) g",
        "create table still (id int primary key, v text)",
        f"insert into still select g, {text} from generate_series(1, {_ROWS}) g",
        "create table heap (a int, b text)",
        "alter table heap replica identity full",
        f"insert into heap select g % 7, 'same' from generate_series(1, {_ROWS}) g",
    )
    tables = ("public.t", "public.still", "public.heap")
    # No file has rows that change and others: compaction keeps partitions apart.
    per_table = {"public.t": {"partition_by": "part"}}
    pipeline = InProcess(spark, dsn, tmp_path, tables, per_table=per_table, snapshot_range_bytes=128 << 10)
    pipeline.snapshot()

    def change(turn: int) -> None:
        key = turn % 100 + 1
        execute(
            dsn,
            f"update t set n = n + 1 where id between 1 and 200 and id % 10 = {turn % 10}",
            f"delete from t where id = {key}; insert into t values ({key}, {turn}, 'new', 'new', 'hot')",
            f"update t set id = -id where id in ({key + 100}, {-key - 100})",
            f"insert into t values ({_ROWS + turn + 1}, 0, 'more', 'more', 'hot')",
            "delete from heap where ctid = (select min(ctid) from heap)",
            f"insert into heap values ({turn}, 'other'), ({turn}, 'other')",
        )

    with repeating(change):
        with pipeline.replicating(EAGER):
            pipeline.wait_for_points(2, *tables)
        before = {table: _ids(pipeline, table) for table in ("public.t", "public.still")}
        _drop_slot(pipeline)
        pipeline.resync()
        kept = {table: _ids(pipeline, table) for table in before}
        with pipeline.replicating(EAGER):
            pipeline.wait_for_points(2, *tables)
    assert read_epoch(pipeline.changelog).epoch == 2
    assert "copied, not compared" not in pipeline.log.read_text()
    cold = {file for file, ids in before["public.t"].items() if ids <= set(range(201, _ROWS + 1))}
    assert cold
    assert cold <= kept["public.t"].keys()
    assert before["public.still"].keys() == kept["public.still"].keys()
    pipeline.catch_up()
    pipeline.assert_equal(*tables)


def _reported(monkeypatch: pytest.MonkeyPatch) -> dict[TableCopy, CopyProgress]:
    """Return the progress of each comparison from now on."""
    found, count = dict[TableCopy, CopyProgress](), TableCopy.count

    def counted(copy: TableCopy, *range_and_rows: int, is_kept: bool) -> None:
        count(copy, *range_and_rows, is_kept=is_kept)
        found[copy] = copy.progress()

    monkeypatch.setattr(TableCopy, "count", counted)
    return found


def test_single_tables_are_compared_in_their_epoch_while_all_are_written(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One was replaced at the source by a table that took its name, one lacks changes, one is not errored."""
    names = ("swapped", "gap", "sound", "other")
    fill = (
        "select g, g % 5, repeat('v' || g, 50), case when g > 200 then 'cold' else 'hot' end"
        f" from generate_series(1, {_ROWS}) g"
    )
    columns = "(id int primary key, n int, v text, part text)"
    execute(
        dsn,
        *(f"create table {name} {columns}; insert into {name} {fill}" for name in names),
    )
    tables = tuple(f"public.{name}" for name in names)
    per_table = {table: {"partition_by": "part"} for table in tables}
    pipeline = InProcess(spark, dsn, tmp_path, tables, per_table=per_table, snapshot_range_bytes=128 << 10)
    pipeline.snapshot()

    def change(turn: int) -> None:
        for name in names:
            execute(
                dsn,
                f"update {name} set n = n + 1 where id between 1 and 200 and id % 10 = {turn % 10}",
                f"insert into {name} values ({_ROWS + turn + 1}, 0, 'more', 'hot')",
            )

    with repeating(change), pipeline.replicating(EAGER):
        pipeline.wait_for_points(2, *tables)
        execute(
            dsn,
            f"create table fresh {columns}; insert into fresh {fill}",
            "begin; alter table swapped rename to former; alter table fresh rename to swapped; commit",
            f"alter publication {pipeline.pipeline.publication} drop table gap",
            "delete from gap where id = 7",
            f"alter publication {pipeline.pipeline.publication} add table gap",
        )
        errored = ("public.gap", "public.swapped")
        wait_until(lambda: all(pipeline.states()[table].state == "errored" for table in errored))
        before = {table: _ids(pipeline, table) for table in tables}
        reported = _reported(monkeypatch)
        assert pipeline.run("snapshot", "--resync", ",".join(tables[:3])) == 0, pipeline.log_tail()
        assert {progress.bytes / progress.total_bytes for progress in reported.values()} == {1.0}
        assert min(progress.rows for progress in reported.values()) >= _ROWS - 1
        assert len(reported) >= 3
        pipeline.wait_for_points(2, *tables)
        after = {table: _ids(pipeline, table) for table in tables}
    assert read_epoch(pipeline.changelog).epoch == 1
    assert "copied, not compared" not in pipeline.log.read_text()
    for table in tables[:3]:
        cold = {file for file, ids in before[table].items() if ids <= set(range(201, _ROWS + 1))}
        assert cold
        assert cold <= after[table].keys()
    assert {table for table in tables if "resync" in _kinds(pipeline, table)} == set(tables[:3])
    pipeline.catch_up()
    pipeline.assert_equal(*tables)
    for wrong in (["--resync="], ["--resync", "public.gap", "--give-up", "1/shop"]):
        assert pipeline.run("snapshot", *wrong) == 78
    assert "ConfigError: no table was named" in pipeline.log.read_text()
    assert "a resync of single tables begins no new epoch" in pipeline.log_tail()


@pytest.mark.thorough("test_taking_over: a snapshot that was killed begins there again")
def test_killed_resync_is_run_again_and_continues_its_epoch(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("a", "b")
    execute(dsn, *(f"create table {name} (id int primary key, n int)" for name in names))
    execute(dsn, *(f"insert into {name} select g, g from generate_series(1, 100) g" for name in names))
    pipeline = InProcess(spark, dsn, tmp_path, ("public.a", "public.b"))
    pipeline.snapshot()
    _drop_slot(pipeline)
    execute(dsn, *(f"update {name} set n = 0 where id = 1" for name in names))
    begin = TableRepair.commit_as_copy

    def killed(repair: TableRepair, *arguments: Any) -> None:
        if repair.relation.table.name == "b":
            raise EndedAtOnce
        begin(repair, *arguments)

    assert pipeline.run("snapshot", "--resync") == 78
    name = re.findall(r"--give-up ([^ ,]+)", pipeline.log_tail())[-1]
    with monkeypatch.context() as patched:
        patched.setattr(TableRepair, "commit_as_copy", killed)
        # A killed process records no states either, whether `a` was committed before that or not.
        patched.setattr(CopyStates, "_end", lambda *_: None)
        patched.setattr(SnapshotCopy, "_finish", lambda *_: None)
        assert pipeline.run("snapshot", "--resync", "--give-up", name) == 75
    assert (_kind(pipeline, "public.a"), _kind(pipeline, "public.b")) == ("resync", "snapshot")
    assert {str(record.state) for record in pipeline.states().values()} == {"snapshotting"}
    execute(dsn, *(f"update {name} set n = -1 where id = 2" for name in names))
    assert pipeline.run("snapshot", "--resync") == 0, pipeline.log_tail()
    assert read_epoch(pipeline.changelog).epoch == 2
    assert "continuing the present epoch" in pipeline.log_tail()
    assert "public.b: 0 of 2 ranges were read by an earlier comparison" in pipeline.log.read_text()
    assert (_kind(pipeline, "public.a"), _kind(pipeline, "public.b")) == ("resync", "resync")
    pipeline.assert_equal("public.a", "public.b")
    execute(dsn, *(f"delete from {name} where id = 3" for name in names))
    pipeline.catch_up()
    pipeline.assert_equal("public.a", "public.b")
    # No table is left: a further run begins an epoch.
    assert pipeline.run("snapshot", "--resync") == 0, pipeline.log_tail()
    assert read_epoch(pipeline.changelog).epoch == 3
    assert all(record.verified_through for record in pipeline.states().values())
    pipeline.catch_up()


def test_comparison_after_a_killed_one_reads_only_the_ranges_that_changed(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of one range are missing, those of two are damaged, and the rows of one have changed."""
    fill = f"select g, g % 5, repeat('v' || g, 50) from generate_series(1, {_ROWS}) g"
    execute(
        dsn,
        "create table t (id int primary key, n int, v text) with (autovacuum_enabled = off)",
        f"insert into t {fill}",
    )
    pipeline = InProcess(spark, dsn, tmp_path, ("public.t",), snapshot_range_bytes=64 << 10)
    pipeline.snapshot()
    _lose_row(pipeline, "public.t")

    def killed(*_: Any) -> None:
        raise EndedAtOnce

    with monkeypatch.context() as patched:
        patched.setattr(LakeSide, "collect", killed)
        assert pipeline.run("snapshot", "--resync", "public.t") == 75
    folder = Path(pipeline.pipeline.lake_root, "_pgrepl/copies/public/t")
    kept = sorted(folder.iterdir(), key=_first_page)
    assert len(kept) > 8
    kept[3].unlink()
    kept[4].write_bytes(kept[4].read_bytes()[:20])
    damaged = bytearray(kept[5].read_bytes())
    damaged[-1] ^= 1
    kept[5].write_bytes(damaged)
    execute(dsn, f"update t set n = -1 where id = {_ROWS}", "vacuum t")
    assert pipeline.run("snapshot", "--resync", "public.t") == 0, pipeline.log_tail()
    assert _kind(pipeline, "public.t") == "resync"
    said = re.findall(r"public.t: (\d+) of (\d+) ranges were read by an earlier", pipeline.log.read_text())
    assert said[0][0] == str(len(kept) - 4)
    assert int(said[0][1]) >= len(kept)
    pipeline.catch_up()
    pipeline.assert_equal("public.t")
    assert not folder.parents[1].exists()


def _first_page(sums: Path) -> int:
    header = json.loads(sums.read_bytes().partition(b"\n")[0])
    return int(header["copied"]["start"])


def _lose_row(pipeline: InProcess, table: str) -> None:
    """Delete a row as an application of the first epoch would that still runs."""
    lake, app = open_table(pipeline.lake_path(table)), app_id(pipeline.pipeline.name, Epoch(1))
    position, rows = LSN((app_version(lake, app) or 0) + 1), FileRows(lake)
    commit = SliceCommit(lake, app, position, None, app_version(lake, RELATION_APP) or 0)
    places = rows.find(pa.table({"id": [9]}))
    commit.replace(rows, places, rows.rows(places.where(np.zeros(1, np.bool_)), rows.schema.names), "rewrite")


def test_table_that_cannot_be_compared_is_copied(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("past", "soft", "wider", "foreign_rows", "lost", "other", "much", "split", "alike", "raced")
    execute(dsn, *(f"create table {name} (id int primary key, n int)" for name in names))
    execute(dsn, *(f"insert into {name} select g, g from generate_series(1, 200) g" for name in names))
    execute(dsn, "alter table split add placed date not null default '2026-01-31'")
    tables = tuple(f"public.{name}" for name in names)
    options = {
        "public.past": {"history": True},
        "public.soft": {"deletes": "soft"},
        "public.split": {"partition_by": "year(placed)"},
    }
    pipeline = InProcess(spark, dsn, tmp_path, tables, per_table=options)
    pipeline.snapshot()
    pipeline.configure(per_table=options | {"public.split": {"partition_by": "month(placed)"}})
    _drop_slot(pipeline)
    monkeypatch.setattr(resync, "MOST_ROWS", 100)
    monkeypatch.setattr(resync, "FEW_ROWS", 50)
    execute(dsn, "alter table wider add column more int default 7", "update other set n = -n")
    execute(dsn, "update alike set n = 0 where id = 1", "update much set n = -n where id <= 60")
    DeltaTable(pipeline.lake_path("public.foreign_rows")).delete("id = 1")
    lost = Path(pipeline.lake_path("public.lost"))
    lost.rename(tmp_path / "away")
    begin, raced = TableRepair.commit_as_copy, []

    def race(repair: TableRepair, *arguments: Any) -> None:
        """Commit as another process would between a comparison and its commit, once."""
        if repair.relation.table.name == "raced" and not raced:
            raced.append(repair)
            _lose_row(pipeline, "public.raced")
        begin(repair, *arguments)

    monkeypatch.setattr(TableRepair, "commit_as_copy", race)
    pipeline.resync()
    assert "public.raced is compared again" in pipeline.log.read_text()
    assert re.search(r"public.raced: version .* 1 were missing, 0 extra, 0 changed", pipeline.log.read_text())
    reasons = dict(re.findall(r"public\.(\w+) is copied, not compared: (.*)", pipeline.log.read_text()))
    assert reasons.keys() == set(names) - {"alike", "raced"}
    assert "history" in reasons["past"]
    assert "soft" in reasons["soft"]
    assert '"more"' in reasons["wider"]
    assert "another program has written it" in reasons["foreign_rows"]
    assert "there is no lake table" in reasons["lost"]
    assert "other partitions than partition_by" in reasons["split"]
    assert set(pipeline.lake_rows("public.split")["_pgrepl_partition"].to_pylist()) == {"2026-01"}
    assert "ranges of its rows differ" in reasons["other"]
    assert reasons["much"] == "60 rows differ from the 200 rows of the source"
    assert {name for name in names if _kind(pipeline, f"public.{name}") == "resync"} == {"alike", "raced"}
    execute(dsn, *(f"delete from {name} where id = 5" for name in names))
    pipeline.catch_up()
    pipeline.assert_equal(*(table for table in tables if table != "public.soft"))
