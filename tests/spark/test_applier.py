"""From the changelog into the lake: whole transactions, and errors that stop one table alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.in_process import InProcess
from tests.support.replicated import execute

BOTH = ("public.t", "public.u")
ALL = (*BOTH, "public.w")


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path) -> InProcess:
    """Tables `t`, `u` and `w` of three rows each, in the lake."""
    for table in "tuw":
        execute(
            dsn,
            f"create table {table}(id int primary key, v text)",
            f"insert into {table} select g, 'old' from generate_series(1, 3) g",
        )
    pipeline = InProcess(spark, dsn, tmp_path, ALL)
    pipeline.snapshot()
    return pipeline


@pytest.fixture
def in_small_steps(replicated: InProcess) -> InProcess:
    """The same, with limits so low that each commit is a batch and each transaction a slice."""
    replicated.configure(batch_bytes=1, slice_bytes=1, part_bytes=1 << 20)
    replicated.catch_up()
    return replicated


@pytest.mark.thorough("test_invariants; integration/test_receiver: a large transaction")
def test_a_transaction_of_many_parts_is_whole_at_every_point(in_small_steps, dsn):
    replicated = in_small_steps
    execute(
        dsn,
        "begin; insert into u values (10, 'first');"
        " insert into t select g, repeat('x', 600) from generate_series(11, 40010) g;"
        " insert into u values (11, 'last'); commit",
        "begin; insert into u values (12, 'b'); delete from t where id > 20010; commit",
    )
    replicated.receive()
    assert max(count_parts(replicated)) >= 3
    replicated.catch_up()
    sql = "select (select count(*) from public.t) as t, (select count(*) from public.u) as u"
    seen = [(row["t"], row["u"]) for row in replicated.at_every_point(sql, *BOTH)]
    assert set(seen) <= {(3, 3), (40_003, 5), (20_003, 6)}
    assert seen[-1] == (20_003, 6)
    replicated.assert_equal(*BOTH)


def count_parts(replicated: InProcess) -> list[int]:
    """For each transaction, the number of files that hold a part of it."""
    files: dict[int, set[str]] = {}
    for row in replicated.changelog_rows():
        files.setdefault(row["commit_lsn"], set()).add(row["file"])
    return [len(held) for held in files.values()]


@pytest.mark.thorough("property/test_collapse; unit/test_table_position")
def test_changes_that_leave_nothing_behind_still_move_the_table(replicated, dsn):
    before = replicated.position("public.t")
    execute(
        dsn,
        "begin; insert into t values (10, 'a'); delete from t where id = 10; commit",
        "update t set id = 20 where id = 1",
        "update t set id = 1 where id = 20",
        "begin; insert into t values (30); delete from t where id = 30; commit",
    )
    replicated.catch_up()
    assert (
        replicated.position("public.t") >= replicated.changelog_rows("I", "U", "D")[-1]["commit_lsn"] > before
    )
    replicated.assert_equal(*BOTH)


def test_nothing_of_sparks_own_is_in_the_lake(replicated, dsn):
    """Files that an earlier version kept there of its query have no effect."""
    folder = Path(system_folder(replicated.pipeline.lake_root))
    offsets = folder / "checkpoint" / "offsets"
    offsets.mkdir(parents=True)
    (offsets / "7").write_text(
        'v1\n{"batchWatermarkMs":0,"batchTimestampMs":0,"conf":{}}\n{"version": 1000000}'
    )
    execute(dsn, "insert into t values (100, 'a')", "delete from u where id = 1")
    replicated.catch_up()
    replicated.assert_equal(*ALL)
    assert [path.name for path in offsets.iterdir()] == ["7"]
    assert {path.name for path in folder.iterdir()} == {
        "changelog", "consistent_points", "relations", "checkpoint"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("ddl", "reason"),
    [
        ("alter table t rename v to w", "renamed"),
        pytest.param(
            "alter table t alter v type varchar(10)",
            "type of column v changed",
            marks=pytest.mark.thorough("the same test, of a column that is renamed"),
        ),
    ],
)
def test_a_changed_table_stops_alone_and_a_new_snapshot_mends_it(replicated, dsn, ddl, reason):
    execute(
        dsn,
        "insert into t values (10, 'before')",
        ddl,
        "insert into t(id) values (11)",
        "delete from u where id = 1",
    )
    assert replicated.run("replicate", "--until", "caught-up") == 78
    record = replicated.states()["public.t"]
    assert (str(record.state), str(replicated.states()["public.u"].state)) == ("errored", "streaming")
    assert reason in record.reason
    assert "--tables" in record.hint
    assert record.lsn is not None
    replicated.assert_equal("public.u")
    assert sorted(replicated.lake_rows("public.t")["id"].to_pylist()) in ([1, 2, 3, 10], [1, 2, 3])

    execute(dsn, "insert into t(id) values (12)")
    replicated.resnapshot("public.t")
    execute(dsn, "update t set id = 13 where id = 12")
    replicated.catch_up()
    assert str(replicated.states()["public.t"].state) == "streaming"
    replicated.assert_equal(*BOTH)


@pytest.mark.thorough(
    "integration/test_evolution; test_a_changed_table_stops_alone_and_a_new_snapshot_mends_it"
)
def test_a_table_is_altered_while_it_is_replicated_and_others_go_on(replicated, dsn):
    with replicated.replicating() as running:
        execute(
            dsn,
            "alter table t add w int default 5",
            "begin; insert into t values (10, 'a', 6); update u set v = 'b'; alter table u drop column v;"
            " insert into u values (11); commit",
            "alter table w rename v to x",
            "insert into w values (12, 'never')",
            "insert into t values (13, 'c', 7)",
        )
        running.wait_for(replicated.source_lsn())
    states = replicated.states()
    assert [str(states[table].state) for table in ALL] == ["streaming", "streaming", "errored"]
    assert (states["public.w"].error, "renamed" in states["public.w"].reason) == ("DriftError", True)
    relation = states["public.t"].relation
    assert relation is not None
    assert [column.name for column in relation.columns] == ["id", "v", "w"]
    replicated.assert_equal("public.t")
    assert sorted(replicated.lake_rows("public.u")["id"].to_pylist()) == [1, 2, 3, 11]
    assert replicated.lake_rows("public.w").num_rows == 3


def test_commits_of_an_epoch_that_is_over_do_not_stop_the_new_one(in_small_steps, dsn):
    replicated = in_small_steps
    for number in range(10, 13):
        execute(dsn, f"insert into t values ({number}, 'a')")
        replicated.receive()
    replicated.snapshot("--new-epoch")
    execute(dsn, "insert into t values (20, 'b')")
    replicated.catch_up()
    replicated.assert_equal(*BOTH)


def test_caught_up_is_only_said_when_everything_is_in_the_lake(in_small_steps, dsn):
    """After a backlog of many batches, most of which could hold something of `u` and do not."""
    replicated = in_small_steps
    for number in range(10, 15):
        execute(dsn, f"begin; insert into t values ({number}); insert into w values ({number}); commit")
        replicated.receive()
    execute(dsn, "insert into u values (10, 'a')")
    replicated.catch_up()
    replicated.assert_equal(*ALL)


@pytest.mark.thorough("integration/test_state_locks; integration/test_receiver: a second receiver is refused")
def test_a_second_replication_is_refused_and_told_by_whom(replicated, dsn):
    with StateDatabase(dsn, "the first one") as state_db:
        state_db.lock(replicated.pipeline.name, "replicate")
        assert replicated.run("replicate", "--until", "caught-up") == 75
    assert f"pgrepl replicate {replicated.pipeline.name}" in replicated.log_tail()
    with replicated.receiving():
        assert replicated.run("replicate", "--until", "caught-up") == 75
    assert "is active for PID" in replicated.log_tail()
    replicated.catch_up()
