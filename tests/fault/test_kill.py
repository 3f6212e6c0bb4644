"""kill -9 at chosen points and at random times: after a restart the lake equals the source."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_for_end, wait_until
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

DYING = Path(__file__).with_name("dying.py")


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path, request: pytest.FixtureRequest) -> InProcess:
    """`request.param`, if any: the strategy by which its tables are merged."""
    execute(dsn, *SETUP)
    merge = getattr(request, "param", "auto")
    return InProcess(
        spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY, snapshot_range_bytes=65536, merge=merge
    )


def run_until_killed(
    replicated: InProcess, app: str, point: str, monkeypatch: pytest.MonkeyPatch, *arguments: str
) -> None:
    monkeypatch.setenv("PGREPL_TEST_POINT", point)
    process = replicated.start(app, app, *arguments, script=DYING)
    try:
        assert wait_for_end(process) == -signal.SIGKILL, f"{point}: {replicated.log_tail()}"
    finally:
        kill(process)


def run_again(replicated: InProcess, app: str, *arguments: str) -> None:
    """Run an app again while its exit code says that this may help, as its supervisor does."""

    def is_done() -> bool:
        code = replicated.run(app, *arguments)
        assert code in (0, 75), replicated.log_tail()
        return code == 0

    wait_until(is_done, what=f"{app} to succeed")


def assert_whole(replicated: InProcess, point: str = "") -> None:
    for table in TABLES:
        assert not replicated.differences(table), f"{point}: {table}: {replicated.differences(table)}"
    sums = replicated.at_every_point(SUMS, *TABLES)
    assert sums, point
    assert all(row == WHOLE for row in sums), (point, sums)


@pytest.mark.real_kill
@pytest.mark.parametrize(
    ("replicated", "of_snapshot", "of_replication"),
    [
        pytest.param(
            "merge_on_read",
            "snapshot of one table committed",
            ("durable and not told", "rows marked and not committed", "rows marked and committed"),
            id="merge_on_read",
        ),
        pytest.param(
            "rewrite",
            "epoch begun",
            ("receiving", "parts written", "durable and not told", "merging", "one table applied"),
            marks=pytest.mark.thorough("the parameter merge_on_read"),
            id="rewrite",
        ),
        pytest.param(
            "merge_on_read",
            "snapshot of one table recorded",
            ("one table applied", "all tables applied"),
            marks=pytest.mark.thorough("the parameter merge_on_read"),
            id="whole tables",
        ),
    ],
    indirect=["replicated"],
)
def test_lake_equals_source_after_each_kill(of_snapshot, of_replication, replicated, dsn, monkeypatch):
    """One pipeline, whose snapshot and whose runs are killed one after the other, each at another point."""
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(20)
        run_until_killed(replicated, "snapshot", of_snapshot, monkeypatch)
        writing.wait_for_more(20)
        run_again(replicated, "snapshot")
        writing.wait_for_more(20)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert {str(record.state) for record in replicated.states().values()} == {"streaming"}, of_snapshot
    assert_whole(replicated, of_snapshot)
    for seed, point in enumerate(of_replication, 2):
        with traffic(dsn, seed) as writing:
            writing.wait_for_more(40)
            run_until_killed(replicated, "replicate", point, monkeypatch)
            writing.wait_for_more(10)
        run_again(replicated, "replicate", "--until", "caught-up")
        assert_whole(replicated, point)


@pytest.mark.real_kill
@pytest.mark.thorough("test_lake_equals_source_after_each_kill")
def test_tables_killed_while_added_and_resnapshotted_are_finished_by_next_run(replicated, dsn, monkeypatch):
    """The old version of a table stays as it was, and what was begun is finished by running it again."""
    execute(dsn, "create table late (id int primary key)", "insert into late values (1)")
    replicated.snapshot()
    before = replicated.position(TABLES[0])
    run_until_killed(replicated, "snapshot", "tables published", monkeypatch, "--add", "public.late")
    assert "public.late" not in replicated.states()
    run_until_killed(replicated, "snapshot", "tables begun", monkeypatch, "--tables", TABLES[0])
    assert replicated.states()[TABLES[0]].state == "snapshotting"
    replicated.assert_equal(TABLES[0])
    run_until_killed(
        replicated, "snapshot", "snapshot of one table committed", monkeypatch, "--tables", TABLES[0]
    )
    assert replicated.states()[TABLES[0]].state == "snapshotting"
    assert replicated.position(TABLES[0]) > before
    execute(dsn, "insert into late values (2)")
    with traffic(dsn, 2) as writing:
        writing.wait_for_more(20)
        run_again(replicated, "snapshot", "--add", "public.late")
        run_again(replicated, "snapshot")
        writing.wait_for_more(20)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert {str(record.state) for record in replicated.states().values()} == {"streaming"}
    replicated.assert_equal("public.late")
    assert_whole(replicated)


@pytest.mark.real_kill
@pytest.mark.thorough("test_lake_equals_source_after_each_kill")
@pytest.mark.parametrize("replicated", ["rewrite", "merge_on_read"], indirect=True)
def test_lake_equals_source_after_kills_at_random_times(replicated, dsn):
    """Once while the app starts, and then while it works: after 1 and 2 points, and random traffic."""
    replicated.snapshot()
    chance = random.Random()
    with traffic(dsn, 3) as writing:
        for points in (0, 1, 2):
            seen = len(replicated.log.read_bytes())
            process = replicated.start("replicate")
            try:
                wait_until(lambda: b"receiving from slot" in replicated.log.read_bytes()[seen:])  # noqa: B023
                replicated.wait_for_points(points, *TABLES)
                writing.wait_for_more(chance.randrange(60))
            finally:
                kill(process)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert_whole(replicated)
