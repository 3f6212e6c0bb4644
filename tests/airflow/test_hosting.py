"""One application on this host: real processes, real signals, its folder and its log."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.spark_driver import supervisor
from airflow_provider_pgrepl.spark_driver.claim import (
    RunDirectory,
)
from airflow_provider_pgrepl.spark_driver.process import (
    AppState,
    LocalApp,
    ask_to_end,
)
from tests.airflow.conftest import Journal, eventually, is_alive
from tests.airflow.stand_in_app import SHOP, ended, launch, texts


@pytest.mark.parametrize(
    ("code", "status"), [(0, AppState.DONE), (75, AppState.FAILED), (78, AppState.FAILED)]
)
def test_the_exit_code_of_a_detached_application_is_known(
    place: RunDirectory, journal: Journal, code: int, status: AppState
) -> None:
    app = launch(place, journal, "--exit", str(code))
    assert ended(app) is status
    assert app.exit_code() == code
    assert "the last words" in texts(app, ended=True)


def test_a_stop_lets_the_application_finish(place: RunDirectory, journal: Journal) -> None:
    app = launch(place, journal)
    journal.wait_for("started")
    app.stop()
    assert ended(app) is AppState.DONE
    assert journal.pids("stopped") == journal.pids("started")


def test_an_application_that_does_not_stop_is_killed(place: RunDirectory, journal: Journal) -> None:
    app = launch(place, journal, "--ignore-term", stop_timeout_s=0.5)
    pid = journal.wait_for("started")
    app.stop()
    assert ended(app) is AppState.FAILED
    assert app.exit_code() == 128 + signal.SIGKILL
    assert not is_alive(pid)


def test_an_application_whose_supervisor_is_killed_ends_and_counts_as_lost(
    place: RunDirectory, journal: Journal
) -> None:
    app = launch(place, journal)
    pid = journal.wait_for("started")
    assert app.pid is not None
    os.kill(app.pid, signal.SIGKILL)
    assert ended(app) is AppState.LOST
    eventually(lambda: not is_alive(pid), "the end of the application")
    assert journal.pids("stopped") == [pid]


def test_an_application_is_found_again_by_its_token_alone(place: RunDirectory, journal: Journal) -> None:
    app = launch(place, journal)
    journal.wait_for("started")
    found = place.find(app.token)
    assert found == app
    assert found.status() is AppState.RUNNING
    found.stop()
    ended(app)


def test_a_process_that_got_the_id_of_an_application_is_not_taken_for_it(
    place: RunDirectory, journal: Journal
) -> None:
    app = launch(place, journal, "--exit", "0")
    ended(app)
    eventually(lambda: not is_alive(app.pid or 0), "the end of its supervisor")
    (app.folder / supervisor.EXIT_CODE).unlink()
    other = launch(RunDirectory(place.folder.parent / "other", "replicate", SHOP), journal)
    journal.wait_for("started", count=2)
    (app.folder / supervisor.PID).write_text(str(other.pid))
    assert app.status() is AppState.LOST
    app.stop()
    assert other.status() is AppState.RUNNING
    other.stop()
    assert ended(other) is AppState.DONE


HELD_BACK = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
print("ready", flush=True)
sys.stdin.read()
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
"""


def is_signalled(pid: int) -> bool:
    """Return True if SIGTERM is pending for a process that blocks it."""
    [pending] = re.findall(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_only_a_process_with_the_token_is_signalled() -> None:
    command = [sys.executable, "-c", HELD_BACK, "--token", "right"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        ask_to_end(process.pid, "wrong")
        ask_to_end(2**70, "right")
        assert not is_signalled(process.pid)
        ask_to_end(process.pid, "right")
        assert is_signalled(process.pid)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(120) == -signal.SIGTERM


@pytest.mark.parametrize(
    "token", ["", "..", "/", "/etc", "pgrepl-", f"pgrepl-{'0' * 31}/", f"pgrepl-{'g' * 32}", None, 1, {}, []]
)
def test_only_a_token_finds_an_application(place: RunDirectory, token: Any) -> None:
    assert place.find(token) is None


def test_a_link_in_the_place_is_no_application(place: RunDirectory, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / "precious").touch()
    token = f"pgrepl-{'0' * 32}"
    (place.folder / token).symlink_to(victim)
    assert place.find(token) is None
    assert place.apps() == []
    LocalApp(place.folder / token).remove()
    assert (victim / "precious").exists()


def test_a_run_folder_that_others_may_have_written_in_is_refused(tmp_path: Path) -> None:
    open_to_all, linked = tmp_path / "open", tmp_path / "linked"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    linked.symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(ConfigError, match="can be written in by other users"):
        RunDirectory(open_to_all, "replicate", SHOP)
    with pytest.raises(ConfigError, match="is a link"):
        RunDirectory(linked, "replicate", SHOP)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_run_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(mode=0o700)
    os.chown(tmp_path / "run", 65534, 65534)
    with pytest.raises(ConfigError, match="belongs to user 65534"):
        RunDirectory(tmp_path / "run", "replicate", SHOP)


def test_nobody_else_can_look_into_a_run_folder(place: RunDirectory) -> None:
    for folder in (place.folder, place.folder.parent, place.folder.parent.parent):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_log_is_read_on_from_where_the_last_reader_stopped(tmp_path: Path) -> None:
    app = LocalApp(tmp_path)
    log = tmp_path / supervisor.LOG_PATTERN.format(0)
    log.write_bytes(b"one\ntwo\nthr")
    assert texts(app) == ["one", "two"]
    with log.open("ab") as more:
        more.write(b"ee\nfour")
    assert texts(app) == ["three"]
    assert texts(app, ended=True) == ["four"]
    assert texts(app, ended=True) == []


def test_a_reader_follows_a_log_from_segment_to_segment(tmp_path: Path) -> None:
    log = supervisor.SegmentedLog(tmp_path, segment_bytes=1000, kept=4)
    app = LocalApp(tmp_path)
    tail, read = app.log(), []
    for number in range(500):
        log.write(f"line {number}\nhal".encode())
        log.write(b"f\n")
        if number % 7 == 0:
            read += [line.text for line in tail.new_lines()]
    read += [line.text for line in tail.new_lines(ended=True)]
    assert read == [text for number in range(500) for text in (f"line {number}", "half")]


def test_a_log_that_nobody_reads_stays_within_bounds_and_what_is_lost_is_said(tmp_path: Path) -> None:
    log = supervisor.SegmentedLog(tmp_path, segment_bytes=1000, kept=4)
    for number in range(10_000):
        log.write(f"line {number}\n".encode())
    assert sum(path.stat().st_size for path in tmp_path.glob("log-*")) <= 5000
    read = texts(LocalApp(tmp_path), ended=True)
    assert read[0] == "earlier log lines were dropped before a task read them"
    assert read[-1] == "line 9999"


def test_a_line_longer_than_a_chunk_ends_no_reader(tmp_path: Path) -> None:
    (tmp_path / supervisor.LOG_PATTERN.format(0)).write_bytes(b"y" * (3 << 20) + b"\nnext\n")
    lines = texts(LocalApp(tmp_path))
    assert lines[-1] == "next"
    assert sum(map(len, lines[:-1])) == 3 << 20
