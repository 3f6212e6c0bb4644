"""Apps that are asked to end, and apps that slept while another took their place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tests.support.in_process import InProcess
from tests.support.replicated import execute, kill, wait_for_end, wait_until
from tests.support.silent_proxy import silent_proxy
from tests.support.traffic import INSERT_ONLY, SETUP, SUMS, TABLES, WHOLE, traffic

IMPATIENT = Path(__file__).with_name("impatient.py")
END_SENDERS = (
    "select pg_terminate_backend(pid, 100000) from pg_stat_activity"
    " where datname = current_database() and application_name like 'pgrepl%'",
)


@pytest.fixture
def replicated(spark, dsn, tmp_path: Path) -> InProcess:
    execute(dsn, *SETUP)
    pipeline = InProcess(spark, dsn, tmp_path, TABLES, insert_only=INSERT_ONLY)
    pipeline.snapshot()
    # From here on the log is the app's, without this process's own lines to its JVM.
    pipeline.log.write_text("")
    return pipeline


@pytest.mark.real_kill
@pytest.mark.thorough(
    "integration/test_receiver: all that was received is told; integration/test_stop_signal.py"
)
def test_app_that_is_asked_to_end_confirms_all_that_is_durable(replicated, dsn):
    with traffic(dsn, 1):
        process = replicated.start("replicate")
        try:
            replicated.wait_for_points(3, *TABLES)
            process.send_signal(signal.SIGTERM)
            assert wait_for_end(process) == 0, replicated.log_tail()
        finally:
            kill(process)
        assert "Traceback" not in replicated.log_tail()
        # The walsender reads what the app confirmed, and then that it has gone.
        wait_until(lambda: not replicated.slot().active, what="the end of the walsender")
        assert replicated.slot().confirmed_flush_lsn == replicated.durable_lsn
    replicated.catch_up()
    replicated.assert_equal(*TABLES)
    assert all(row == WHOLE for row in replicated.at_every_point(SUMS, *TABLES))


@pytest.mark.real_kill
@pytest.mark.thorough("integration/test_stop_signal.py and test_receiver.py")
def test_app_that_is_asked_to_end_ends_when_source_is_silent(replicated, dsn):
    with silent_proxy(dsn) as (proxy, through), traffic(dsn, 1):
        replicated.dsn = through
        process = replicated.start("replicate", "replicate", script=IMPATIENT)
        try:
            replicated.wait_for_points(3, *TABLES)
            proxy.fall_silent()
            wait_until(lambda: any(map(is_query, proxy.withheld)), what="a statement without an answer")
            process.send_signal(signal.SIGTERM)
            assert wait_for_end(process) in (0, 75), replicated.log_tail()
        finally:
            kill(process)
            replicated.dsn = dsn
    execute(dsn, *END_SENDERS)
    replicated.catch_up()
    replicated.assert_equal(*TABLES)


def is_query(sent: bytes) -> bool:
    """Return True if this is a simple query of PostgreSQL's protocol; streams send other messages."""
    return sent.startswith(b"Q")


@pytest.mark.real_kill
@pytest.mark.thorough("integration/test_receiver: a second receiver fences the first")
def test_app_that_slept_while_another_took_over_ends_and_changes_nothing(replicated, dsn):
    with traffic(dsn, 2) as writing:
        sleeper = replicated.start("replicate")
        try:
            replicated.wait_for_points(3, *TABLES)
            os.killpg(sleeper.pid, signal.SIGSTOP)
            # What the other receives beyond its target the sleeper would rightly apply.
            writing.stop()
            # This cuts the network between the sleeping app and the server.
            execute(dsn, *END_SENDERS)
            wait_until(lambda: replicated.run("replicate", "--until", "caught-up") == 0)
            before = versions(replicated)
            os.killpg(sleeper.pid, signal.SIGCONT)
            assert wait_for_end(sleeper) == 75, replicated.log_tail()
        finally:
            kill(sleeper)
    assert versions(replicated) == before
    replicated.catch_up()
    replicated.assert_equal(*TABLES)
    assert all(row == WHOLE for row in replicated.at_every_point(SUMS, *TABLES))


def versions(replicated: InProcess) -> list[int]:
    """Return the versions of the changelog and of each lake table."""
    places = [replicated.changelog, *map(replicated.lake_path, TABLES)]
    return [DeltaTable(place).version() for place in places]
