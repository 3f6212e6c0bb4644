"""Single tables are paused, tried again and removed while the others are replicated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.removal import remove_tables
from airflow_provider_pgrepl.replication.app.operations.tables import (
    pause_tables,
    resume_tables,
    retry_tables,
)
from airflow_provider_pgrepl.replication.app.operations.teardown import teardown
from airflow_provider_pgrepl.replication.changelog import writer
from airflow_provider_pgrepl.replication.changelog.layout import hour_of
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.changelog.reader import open_changelog, read_epoch, read_floor_lsn
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.history.table import history_path
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from tests.conftest import closing_connection
from tests.support.in_process import InProcess, Running
from tests.support.received import EAGER
from tests.support.replicated import execute, wait_until
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SAVINGS = "public.savings"
OTHERS = tuple(table for table in TABLES if table != SAVINGS)


def access(replicated: InProcess) -> Access:
    return Access(replicated.pipeline, replicated.dsn, replicated.dsn)


def latest(replicated: InProcess) -> set[str]:
    point = ConsistentPoints(replicated.pipeline.lake_root).latest()
    assert point is not None
    return set(point.tables)


def wait_for_state(replicated: InProcess, table: str, state: str) -> None:
    wait_until(lambda: replicated.states()[table].state == state, what=f"{table} to be {state}")


def copies(replicated: InProcess, table: str) -> int:
    """Return the number of versions of a lake table that snapshots have made."""
    commits = open_table(replicated.lake_path(table)).history()
    return sum('"snapshot"' in commit.get("pgrepl", "") for commit in commits)


@contextmanager
def reporting(replicated: InProcess, running: Running) -> Iterator[None]:
    """Write the applier's progress to the store every 50 ms during the block, as the app's own loop does."""
    stop = threading.Event()

    def report() -> None:
        with access(replicated).state_db("report") as state_db:
            while not stop.wait(0.05):
                state_db.write_progress(replicated.pipeline.name, idle_at=running.applier.progress.idle_at)

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.thorough("integration/test_table_operations")
def test_a_paused_table_stands_still_and_is_whole_again_when_it_goes_on(spark, dsn, tmp_path):
    execute(dsn, *SETUP)
    replicated = InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY, flush_interval_s=0.02)
    with traffic(dsn, 1) as writing:
        replicated.snapshot()
        with replicated.replicating() as running:
            replicated.wait_for_points(1, *TABLES)
            pause_tables(access(replicated), [SAVINGS])
            wait_until(lambda: latest(replicated) == set(OTHERS), what="a point without the paused table")
            version = open_delta(replicated.lake_path(SAVINGS)).version()
            replicated.wait_for_points(4, *OTHERS)
            assert latest(replicated) == set(OTHERS)
            # A merge that was under way may still be committed.
            assert open_delta(replicated.lake_path(SAVINGS)).version() <= version + 1
            resume_tables(access(replicated), [SAVINGS])
            replicated.wait_for_points(2, *TABLES)
            writing.stop()
            running.wait_for(replicated.source_lsn())
            # Resume before any batch has seen that the table was paused.
            pause_tables(access(replicated), [SAVINGS])
            resume_tables(access(replicated), [SAVINGS])
            wait_for_state(replicated, SAVINGS, "streaming")
    replicated.assert_equal(*TABLES)
    assert copies(replicated, SAVINGS) == 1
    assert all(row == WHOLE for row in replicated.at_every_point(SUMS, *TABLES))


def test_a_table_is_resumed_after_its_points_and_the_changes_before_them_have_expired(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only points show that the table has no change in the hours that the other tables no longer need."""
    a, b = "public.a", "public.b"
    execute(dsn, *(f"create table {name} (id int primary key, n int)" for name in "ab"))
    execute(dsn, "insert into a values (1, 1)")
    replicated = InProcess(spark, dsn, tmp_path, (a, b), per_table={a: {"history": True}})
    replicated.snapshot()
    points = ConsistentPoints(replicated.pipeline.lake_root)

    def wait_for_point(*tables: str) -> None:
        lsn = replicated.source_lsn()

        def is_there() -> bool:
            point = ConsistentPoints(replicated.pipeline.lake_root).latest()
            return point is not None and point.lsn >= lsn and {a, b} & point.tables.keys() == set(tables)

        wait_until(is_there, what=f"a point of {tables}")

    with replicated.replicating(EAGER) as running:
        with monkeypatch.context() as earlier:
            earlier.setattr(writer, "hour_of", lambda moment: hour_of(moment - timedelta(hours=3)))
            execute(dsn, "update a set n = 2")
            wait_for_point(a, b)
            before = replicated.position(a)
            execute(dsn, "insert into b values (1, 1)")
            wait_for_point(a, b)
        execute(dsn, "insert into b values (2, 2)")
        wait_for_point(a, b)
        pause_tables(access(replicated), [a])
        execute(dsn, "insert into b values (3, 3)")
        wait_for_point(b)
        needed = running.applier.needed_above()
        assert needed is not None
        points.rewrite(lambda points: points[-1:])
        assert drop_expired(replicated.pipeline.lake_root, 0, {1: needed}, datetime.now(UTC)).files
    assert before is not None
    assert read_floor_lsn(open_changelog(replicated.changelog), Epoch(1)) > before
    execute(dsn, "update a set n = 3")
    resume_tables(access(replicated), [a])
    replicated.catch_up()
    replicated.assert_equal(a, b)
    history = open_table(f"{replicated.pipeline.lake_root}/{history_path(TableName.parse(a))}")
    ended = pa.table(QueryBuilder().register("h", history).execute("select n from h"))
    assert sorted(ended["n"].to_pylist()) == [1, 2]


@pytest.mark.thorough(
    "integration/test_table_operations: a value that did not fit, and tables that are tried again"
)
def test_a_table_goes_on_from_where_it_stopped_once_the_cause_is_gone(spark, dsn, tmp_path):
    execute(
        dsn,
        "create table t (id int primary key, at timestamptz)",
        "create table u (id int primary key)",
        "insert into t values (1, now())",
    )
    replicated = InProcess(spark, dsn, tmp_path, ("public.*",), on_drift="error")
    replicated.snapshot()
    with replicated.replicating() as running:
        execute(dsn, "insert into t values (2, 'infinity')", "insert into u values (1)")
        wait_for_state(replicated, "public.t", "errored")
        assert replicated.states()["public.t"].error == "ValueRangeError"
        execute(dsn, "insert into t values (3, now())", "insert into u values (2)")
        replicated.configure(infinity="null")
        (retried,) = retry_tables(access(replicated))
        assert retried.refused is None
        wait_for_state(replicated, "public.t", "streaming")
        execute(dsn, "alter table u add note text", "insert into u values (3, 'x')")
        wait_for_state(replicated, "public.u", "errored")
        assert replicated.states()["public.u"].error == "DriftError"
        execute(dsn, "insert into t values (4, now())")
        running.wait_for(replicated.source_lsn())
    replicated.configure(on_drift="evolve")
    retry_tables(access(replicated), ["public.u"])
    replicated.catch_up()
    replicated.assert_equal("public.u")
    assert sorted(replicated.lake_rows("public.t")["id"].to_pylist()) == [1, 2, 3, 4]
    assert [copies(replicated, table) for table in ("public.t", "public.u")] == [1, 1]


@pytest.mark.thorough("integration/test_removing_tables, test_teardown")
def test_a_removed_table_is_dropped_under_replication_and_a_teardown_leaves_nothing(spark, dsn, tmp_path):
    execute(dsn, *SETUP)
    replicated = InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY, flush_interval_s=0.02)
    with traffic(dsn, 2) as writing:
        replicated.snapshot()
        with (
            replicated.replicating() as running,
            reporting(replicated, running),
            access(replicated).state_db("replicate") as app,
        ):
            app.lock(replicated.pipeline.name, "replicate")
            replicated.wait_for_points(1, *TABLES)
            remove_tables(access(replicated), [SAVINGS], drop_lake_tables=True, timeout_s=150)
            assert not Path(replicated.lake_path(SAVINGS)).exists()
            replicated.wait_for_points(2, *OTHERS)
            assert latest(replicated) == set(OTHERS)
            writing.stop()
            running.wait_for(replicated.source_lsn())
    assert not Path(replicated.lake_path(SAVINGS)).exists()
    replicated.assert_equal(*OTHERS)
    replicated.catch_up()
    with access(replicated).state_db("test") as state_db:
        progress = state_db.read_progress(replicated.pipeline.name)
    assert progress is not None
    assert progress.idle_at is not None
    teardown(access(replicated))
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select slot_name::text from pg_replication_slots where database = current_database()"
            " union all select pubname::text from pg_publication"
            " union all select nspname::text from pg_namespace where nspname = '_pgrepl'"
        )
        assert cursor.fetchall() == []
    # A snapshot into the lake that was kept begins a new epoch.
    replicated.snapshot()
    assert read_epoch(replicated.changelog).epoch == 2
    replicated.catch_up()
    replicated.assert_equal(*TABLES)


def test_late_error_for_replaced_copy_does_not_stop_resnapshotted_table(spark, dsn, tmp_path):
    execute(dsn, "create table t(id int primary key)")
    replicated = InProcess(spark, dsn, tmp_path, ("public.t",))
    replicated.snapshot()
    with replicated.replicating() as running:
        running.wait_for(replicated.source_lsn())
        wait_for_state(replicated, "public.t", "streaming")
        before = replicated.states()["public.t"]
        # As in a batch that began before, and whose commit the snapshot's came before.
        replicated.resnapshot("public.t")
        for stops, kind in ((True, "FencedError"), (False, "LakeTableError")):
            result = TableResult(before.relation.oid, error="written", error_kind=kind, stops_pipeline=stops)
            with running.applier.held():
                outcomes = running.applier._rounds._outcomes
                outcomes.mark_errored(before, result)
        execute(dsn, "insert into t values (1)")
        running.wait_for(replicated.source_lsn())
    assert replicated.states()["public.t"].state in ("catching_up", "streaming")
    assert pa.table(replicated.lake_rows("public.t"))["id"].to_pylist() == [1]
