"""kill -9 at chosen points and at random times: after a restart the lake equals the source."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_until
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
        assert process.wait(120) == -signal.SIGKILL, replicated.log_tail()
    finally:
        kill(process)


def run_again(replicated: InProcess, app: str, *arguments: str) -> None:
    """As whoever supervises an app does: again while its exit code says that this may help."""

    def is_done() -> bool:
        code = replicated.run(app, *arguments)
        assert code in (0, 75), replicated.log_tail()
        return code == 0

    wait_until(is_done, 120, f"{app} to succeed")


def assert_whole(replicated: InProcess) -> None:
    replicated.assert_equal(*TABLES)
    sums = replicated.at_every_point(SUMS, *TABLES)
    assert sums
    assert all(row == WHOLE for row in sums), sums


@pytest.mark.parametrize(
    ("replicated", "point"),
    [
        ("rewrite", "receiving"),
        ("rewrite", "parts written"),
        ("rewrite", "durable and not told"),
        ("rewrite", "merging"),
        ("merge_on_read", "rows marked and not committed"),
        ("merge_on_read", "rows marked and committed"),
        ("rewrite", "one table applied"),
        ("merge_on_read", "one table applied"),
        ("merge_on_read", "all tables applied"),
    ],
    indirect=["replicated"],
)
def test_replication_killed_at(point, replicated, dsn, monkeypatch):
    replicated.snapshot()
    with traffic(dsn, 1) as writing:
        writing.wait_for_more(40)
        run_until_killed(replicated, "replicate", point, monkeypatch)
        writing.wait_for_more(10)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert_whole(replicated)


@pytest.mark.parametrize(
    "point", ["epoch begun", "snapshot of one table committed", "snapshot of one table recorded"]
)
def test_snapshot_killed_at(point, replicated, dsn, monkeypatch):
    with traffic(dsn, 2) as writing:
        writing.wait_for_more(20)
        run_until_killed(replicated, "snapshot", point, monkeypatch)
        writing.wait_for_more(20)
        run_again(replicated, "snapshot")
        writing.wait_for_more(20)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert {str(record.state) for record in replicated.states().values()} == {"streaming"}
    assert_whole(replicated)


def test_one_table_after_another_is_added_and_taken_anew_by_runs_that_are_killed(
    replicated, dsn, monkeypatch
):
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


@pytest.mark.parametrize("replicated", ["rewrite", "merge_on_read"], indirect=True)
def test_replication_killed_at_random_times(replicated, dsn):
    replicated.snapshot()
    chance = random.Random()
    with traffic(dsn, 3):
        for _ in range(3):
            seen = len(replicated.log.read_bytes())
            process = replicated.start("replicate")
            try:
                wait_until(lambda: "receiving from slot" in replicated.log.read_text()[seen:])  # noqa: B023
                time.sleep(chance.uniform(0, 6))
            finally:
                kill(process)
    run_again(replicated, "replicate", "--until", "caught-up")
    assert_whole(replicated)
