"""kill -9 at chosen points and at random times: after a restart the lake equals the source."""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_for_end, wait_until
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

DYING = Path(__file__).with_name("dying.py")


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path) -> InProcess:
    execute(dsn, *SETUP)
    return InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY, snapshot_range_bytes=65536)


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
    ("of_snapshot", "of_replication"),
    [
        pytest.param(
            ("snapshot of one table committed",),
            (
                ("durable and not told", "merge_on_read"),
                ("rows marked and committed", "merge_on_read"),
            ),
            id="merge_on_read",
        ),
        pytest.param(
            ("epoch begun", "snapshot of one table recorded"),
            (
                ("receiving", "rewrite"),
                ("parts written", "rewrite"),
                ("merging", "rewrite"),
                ("one table applied", "rewrite"),
                ("rows marked and not committed", "merge_on_read"),
                ("one table applied", "merge_on_read"),
                ("all tables applied", "merge_on_read"),
            ),
            marks=pytest.mark.thorough("the parameter merge_on_read"),
            id="every other point",
        ),
    ],
)
def test_lake_equals_source_after_each_kill(of_snapshot, of_replication, replicated, dsn, monkeypatch):
    """One pipeline, whose snapshot and whose runs are killed one after the other, each at another point.

    A run has a point, and the strategy by which tables are merged.
    """
    replicated.configure(merge=of_replication[0][1])
    with traffic(dsn, 1) as writing:
        for point in of_snapshot:
            writing.wait_for_more(20)
            run_until_killed(replicated, "snapshot", point, monkeypatch)
        writing.wait_for_more(20)
        run_again(replicated, "snapshot")
        writing.wait_for_more(20)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert {str(record.state) for record in replicated.states().values()} == {"streaming"}, of_snapshot
    assert_whole(replicated, str(of_snapshot))
    for seed, (point, merge) in enumerate(of_replication, 2):
        replicated.configure(merge=merge)
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
@pytest.mark.thorough("spark/test_resumed_copies.py")
def test_copy_that_is_killed_again_and_again_is_continued(replicated, dsn, monkeypatch):
    """Under traffic on other tables, and some on this one. The second run finds ranges of the first."""
    execute(
        dsn,
        "create table large (id int primary key, v text) with (autovacuum_enabled = off)",
        "insert into large select g, repeat('v', 200) from generate_series(1, 30000) g",
    )
    replicated.configure(tables=(*TABLES, "public.large"))
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(20)
        run_until_killed(replicated, "snapshot", "half of the ranges copied", monkeypatch)
        execute(dsn, "update large set v = 'changed' where id % 10000 = 7")
        run_until_killed(replicated, "snapshot", "half of the ranges copied", monkeypatch)
        execute(dsn, "delete from large where id % 10000 = 8", "insert into large values (0, 'new')")
        run_again(replicated, "snapshot")
    kept = re.findall(r"public.large: (\d+) of (\d+) ranges are those of", replicated.log.read_text())
    assert int(kept[-1][0]) > 10, kept
    run_again(replicated, "replicate", "--until", "caught-up")
    replicated.assert_equal("public.large")
    assert_whole(replicated)


@pytest.mark.real_kill
@pytest.mark.thorough("test_lake_equals_source_after_each_kill")
def test_lake_equals_source_after_kills_at_random_times(replicated, dsn):
    """Once while the app starts, and then while it works: after 1 and 2 points, and random traffic.

    Each strategy merges a table.
    """
    replicated.configure(
        per_table={"public.accounts": {"merge": "rewrite"}, "public.savings": {"merge": "merge_on_read"}}
    )
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
