"""The lake's storage is full, or the state is lost: the remedy that the app names works."""

from __future__ import annotations

import re

from airflow_provider_pgrepl.replication.lake.snapshot import range_copy
from tests.support.in_process import InProcess
from tests.support.loop_disk import disk
from tests.support.replicated import execute, wait_until

T = "public.t"
RANDOM = (
    "select g, string_agg(md5(random()::text), '') from generate_series(1, 3000) g,"
    " generate_series(1, 100) group by g"
)


def test_a_snapshot_that_does_not_fit_leaves_its_table_to_be_taken(spark, dsn, tmp_path, monkeypatch):
    monkeypatch.setattr(range_copy, "_PAUSES_S", (0.1,))
    execute(dsn, "create table t (id int primary key, v text)", f"insert into t {RANDOM}")
    with disk(tmp_path, 64 << 20) as drive:
        drive.fill(leaving=2 << 20)
        one = InProcess(spark, dsn, drive.folder, (T,))
        one.log = tmp_path / "app.log"
        assert one.run("snapshot") == 75, one.log_tail()
        assert "the storage is full" in one.log_tail()
        assert "unexpected" not in one.log_tail()
        assert one.states()[T].state == "errored"
        assert "the storage is full" in one.states()[T].reason
        drive.free()
        assert one.run("snapshot") == 0, one.log_tail()
        execute(dsn, "insert into t values (0, 'x')")
        assert one.run("replicate", "--until", "caught-up") == 0, one.log_tail()
        one.assert_equal(T)
        drive.fill()
        execute(dsn, f"update t set v = x.v from ({RANDOM}) x (id, v) where x.id = t.id")
        assert one.run("replicate", "--until", "caught-up") == 75, one.log_tail()
        assert "the storage is full" in one.log_tail()
        assert one.states()[T].state in ("streaming", "catching_up")
        drive.free()
        # A stream that ended by an error leaves its walsender to end by itself.
        wait_until(lambda: not one.slot().active, what="the slot to be free")
        assert one.run("replicate", "--until", "caught-up") == 0, one.log_tail()
        one.assert_equal(T)


def test_after_its_state_was_lost_a_pipeline_begins_anew(spark, dsn, tmp_path):
    execute(dsn, "create table t (id int primary key, v text)", "insert into t values (1, 'x')")
    one = InProcess(spark, dsn, tmp_path, (T,))
    assert one.run("snapshot") == 0, one.log_tail()
    execute(dsn, "drop schema _pgrepl cascade", "insert into t values (2, 'y')")
    for app in ("replicate", "snapshot"):
        assert one.run(app) == 78
        assert "knows nothing of the pipeline" in one.log_tail()
    assert one.run("snapshot", "--new-epoch") == 78
    name = re.findall(r"--give-up ([^ ,]+)", one.log_tail())[-1]
    assert one.run("snapshot", "--new-epoch", "--give-up", name) == 0, one.log_tail()
    execute(dsn, "insert into t values (3, 'z')")
    assert one.run("replicate", "--until", "caught-up") == 0, one.log_tail()
    one.assert_equal(T)
