"""Tables reverted by a restored folder or a power cut: fixed from the changelog, or reported."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.losses import accept_missing
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.apply import applier, merge_scheduler
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.history.table import history_uri
from airflow_provider_pgrepl.replication.lake.maintenance import Maintenance
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.support.in_process import InProcess, Running
from tests.support.replicated import execute
from tests.support.shared_pipeline import SharedPipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

T, U = "public.t", "public.u"
NUMBERS = itertools.count(10)
"""Keys of new rows."""


@pytest.fixture
def fresh(spark, dsn, tmp_path: Path) -> InProcess:
    """Tables `t` and `u` of three rows each, and some commits to them, in the lake."""
    return begun_pipeline(spark, dsn, tmp_path)


def begun_pipeline(spark: SparkSession, dsn: str, folder: Path) -> InProcess:
    for table in "tu":
        execute(
            dsn,
            f"create table {table}(id int primary key, v text)",
            f"insert into {table} select g, 'old' from generate_series(1, 3) g",
        )
    pipeline = InProcess(spark, dsn, folder, (T, U))
    pipeline.snapshot()
    change(pipeline)
    return pipeline


@pytest.fixture(scope="module")
def shared(
    spark: SparkSession, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SharedPipeline]:
    folder = tmp_path_factory.mktemp("shared")
    with closing(SharedPipeline(partial(begun_pipeline, spark), server, folder)) as found:
        yield found


@pytest.fixture
def replicated(shared: SharedPipeline) -> Iterator[InProcess]:
    """A pipeline like `fresh`, after other tests that left all tables whole; its log is the test's own."""
    with shared.lent() as pipeline:
        yield pipeline


def change(replicated: InProcess, commits: int = 4, tables: str = "tu") -> None:
    """Commit changes to the tables, each applied to the lake as a batch of its own."""
    with replicated.replicating() as running:
        for _ in range(commits):
            number = next(NUMBERS)
            statements = [f"insert into {table} values ({number}, 'new')" for table in tables]
            execute(replicated.dsn, *statements, *(f"update {table} set v = v || 'x'" for table in tables))
            running.wait_for(replicated.source_lsn())


def insert(replicated: InProcess, running: Running, table: str) -> None:
    """Insert a row, and wait until it is in the lake."""
    execute(replicated.dsn, f"insert into {table} values ({next(NUMBERS)}, 'a')")
    running.wait_for(replicated.source_lsn())


def keep(replicated: InProcess, *tables: str) -> dict[str, Path]:
    """Copy each table's folder, as a backup does."""
    kept = {}
    for path in map(replicated.lake_path, tables):
        kept[path] = Path(f"{replicated.file.parent}/kept-{next(NUMBERS)}")
        shutil.copytree(path, kept[path])
    return kept


def put_back(kept: dict[str, Path]) -> None:
    for path, copy in kept.items():
        shutil.rmtree(path)
        shutil.copytree(copy, path)


def newest_commit(path: str, back: int = 0) -> Path:
    return sorted(Path(path, "_delta_log").glob("*.json"))[-1 - back]


def assert_whole(replicated: InProcess, *tables: str) -> None:
    """Check that the lake equals the source, and that what consistent points name exists and matches."""
    replicated.assert_equal(*tables)
    for point in ConsistentPoints(replicated.pipeline.lake_root).all():
        for table in set(tables) & point.tables.keys():
            version = DeltaTable(replicated.lake_path(table), version=point.tables[table])
            app = f"{replicated.pipeline.name}:{point.epoch}"
            assert version.transaction_version(app) == point.positions[table] <= point.lsn


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(True, id="changed since"),
        pytest.param(False, id="idle since", marks=pytest.mark.thorough("the same test, changed since")),
    ],
)
def test_a_folder_that_was_put_back_is_brought_forward_again(replicated, changed):
    kept = keep(replicated, T)
    change(replicated)
    put_back(kept)
    if changed:
        new = next(NUMBERS)
        execute(replicated.dsn, f"insert into t values ({new}, 'after')", "delete from u where id = 1")
    replicated.catch_up()
    assert_whole(replicated, T, U)
    assert "reverted" in replicated.log_tail()
    change(replicated, 1)
    assert_whole(replicated, T, U)


@pytest.mark.parametrize(
    "emptied",
    [
        pytest.param([0], id="newest", marks=pytest.mark.thorough("the same test, newest three")),
        pytest.param([0, 1, 2], id="newest three"),
        pytest.param([2], id="below others", marks=pytest.mark.thorough("the same test, newest three")),
    ],
)
@pytest.mark.thorough("integration/test_torn_commits")
def test_commits_that_were_emptied_are_made_again(fresh, spark, emptied):
    replicated = fresh
    path = replicated.lake_path(T)
    for back in emptied:
        newest_commit(path, back).write_bytes(b"")
    # Workers that have the table open have read what its log holds no more; in a power cut none is left.
    for file in Path(path, "_delta_log").glob("*.json"):
        file.write_bytes(file.read_bytes())
    replicated.catch_up()
    assert_whole(replicated, T, U)
    change(replicated, 1)
    assert_whole(replicated, T, U)
    assert spark.read.format("delta").load(path).count() == 8
    assert all(file.stat().st_size for file in Path(path, "_delta_log").glob("*.json"))


@pytest.mark.thorough("test_a_folder_that_was_put_back_is_brought_forward_again")
def test_a_table_that_goes_back_under_a_running_app_is_brought_forward(replicated):
    kept = keep(replicated, T)
    change(replicated, 2)
    with replicated.replicating() as running:
        insert(replicated, running, "t")
        put_back(kept)
        insert(replicated, running, "t")
        insert(replicated, running, "t")
    replicated.catch_up()
    assert str(replicated.states()[T].state) == "streaming"
    assert_whole(replicated, T, U)


@pytest.mark.thorough("test_a_folder_that_was_put_back_is_brought_forward_again")
def test_an_idle_table_that_goes_back_under_a_running_app_is_seen(replicated, monkeypatch):
    monkeypatch.setattr(merge_scheduler, "LOOK_INTERVAL_S", 0.0)
    kept = keep(replicated, T)
    change(replicated, 2)
    with replicated.replicating() as running:
        for _ in range(2):
            insert(replicated, running, "u")
        # Or it is looked at while half of it is there.
        with running.applier.held():
            put_back(kept)
        for _ in range(3):
            insert(replicated, running, "u")
        replicated.assert_equal(T, U)
    assert_whole(replicated, T, U)


def test_retention_keeps_what_a_table_that_went_back_needs(replicated):
    kept = keep(replicated, T)
    before = replicated.position(T)
    change(replicated, 2)
    put_back(kept)
    with StateDatabase(replicated.dsn, "replicate test") as state_db:
        record = read_epoch(replicated.changelog)
        fresh = applier.Applier(replicated.spark, replicated.pipeline, state_db, record)
        assert fresh.needed_above() <= before
    replicated.catch_up()
    assert_whole(replicated, T, U)


@pytest.mark.thorough("the other tests of this file")
def test_a_history_that_went_back_alone_stops_the_table_and_with_it_both_are_mended(spark, dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v text)", "insert into t values (1, 'a')")
    replicated = InProcess(spark, dsn, tmp_path, (T,), history=True)
    replicated.snapshot()
    change(replicated, 2, "t")
    history = history_uri(replicated.pipeline.lake_root, TableName.parse(T))
    kept = keep(replicated, T)
    kept[history] = tmp_path / "kept-history"
    shutil.copytree(history, kept[history])
    change(replicated, 2, "t")
    expected = sorted(DeltaTable(history).to_pyarrow_table()["_pgrepl_to_lsn"].to_pylist())
    put_back(kept)
    replicated.catch_up()
    assert_whole(replicated, T)
    assert sorted(DeltaTable(history).to_pyarrow_table()["_pgrepl_to_lsn"].to_pylist()) == expected
    put_back({history: kept[history]})
    assert replicated.run("replicate", "--until", "caught-up") == 78, "also without a change"
    assert "history" in replicated.states()[T].reason


@pytest.mark.thorough("unit/test_points")
def test_points_that_were_put_back_do_no_harm(replicated):
    folder = Path(system_folder(replicated.pipeline.lake_root), "consistent_points")
    kept = {str(folder): replicated.file.parent / "kept-points"}
    shutil.copytree(folder, kept[str(folder)])
    change(replicated, 2)
    put_back(kept)
    change(replicated, 1)
    assert_whole(replicated, T, U)
    Maintenance(replicated.pipeline).run()
    assert_whole(replicated, T, U)


def test_a_folder_older_than_the_kept_changes_stops_the_table(replicated):
    kept = keep(replicated, T)
    change(replicated, 2)
    drop_all_hours(replicated)
    put_back(kept)
    assert replicated.run("replicate", "--until", "caught-up") == 78
    assert "holds changes above" in replicated.states()[T].reason
    replicated.assert_equal(U)


def drop_all_hours(replicated: InProcess) -> None:
    applied = ConsistentPoints(replicated.pipeline.lake_root).latest().lsn
    later = datetime.now(UTC) + timedelta(days=2)
    assert drop_expired(replicated.pipeline.lake_root, 1, {1: applied}, later).files


@pytest.mark.thorough("test_a_folder_older_than_the_kept_changes_stops_the_table")
def test_a_folder_from_before_the_table_was_taken_anew_stops_it(replicated):
    kept = keep(replicated, T)
    replicated.resnapshot(T)
    replicated.catch_up()
    put_back(kept)
    assert replicated.run("replicate", "--until", "caught-up") == 78
    assert "before its last copy" in replicated.states()[T].reason
    replicated.assert_equal(U)


@pytest.mark.parametrize(
    "is_back",
    [
        pytest.param(False, id="out for good", marks=pytest.mark.thorough("the same test, in again")),
        pytest.param(True, id="in again"),
    ],
)
def test_without_the_index_of_relations_it_is_still_seen_how_tables_are_published(replicated, is_back):
    """It is given up by choice. One change announces the table that it is of: the index is not empty."""
    shutil.rmtree(system_folder(replicated.pipeline.lake_root) + "/relations")
    access = Access(replicated.pipeline, replicated.dsn, replicated.dsn)
    assert len(accept_missing(access, dry_run=False)) == 1
    publication = replicated.pipeline.publication
    execute(
        replicated.dsn,
        f"insert into u values ({next(NUMBERS)}, 'new')",
        f"alter publication {publication} drop table t",
        "delete from t where id = 1",
        *([f"alter publication {publication} add table t"] if is_back else []),
        f"insert into u values ({next(NUMBERS)}, 'new')",
    )
    assert replicated.run("replicate", "--until", "caught-up") == 78
    assert str(replicated.states()[T].state) == "errored"
    assert "not in the index" in replicated.log_tail()
    replicated.assert_equal(U)
