"""Detached applications: real processes, real signals."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.operators.local_app import LocalApp, Status
from tests.airflow.conftest import Journal, eventually, is_alive

STAND_IN = str(Path(__file__).parent / "stand_in.py")


def launch(folder: Path, journal: Journal, *arguments: str, stop_timeout_s: float = 20) -> LocalApp:
    run = folder / "run"
    run.mkdir()
    (run / "pipeline.json").write_text('{"name": "shop"}', encoding="utf-8")
    command = [
        sys.executable,
        STAND_IN,
        "--pipeline",
        str(run / "pipeline.json"),
        "--journal",
        str(journal.path),
    ]
    environment = {**os.environ, "PGREPL_DSN": "host=nowhere"}
    return LocalApp.launch([*command, *arguments], STAND_IN, environment, run, stop_timeout_s)


def ended(app: LocalApp) -> Status:
    eventually(lambda: app.status() is not Status.RUNNING, "the end of the application")
    return app.status()


@pytest.mark.parametrize(("code", "status"), [(0, Status.DONE), (75, Status.FAILED), (78, Status.FAILED)])
def test_the_exit_code_of_a_detached_application_is_known(
    tmp_path: Path, journal: Journal, code: int, status: Status
) -> None:
    app = launch(tmp_path, journal, "--exit", str(code))
    assert ended(app) is status
    assert app.exit_code() == code


def test_a_stop_lets_the_application_finish(tmp_path: Path, journal: Journal) -> None:
    app = launch(tmp_path, journal)
    journal.wait_for("started")
    app.stop()
    assert ended(app) is Status.DONE
    assert journal.pids("stopped") == journal.pids("started")


def test_an_application_that_does_not_stop_is_killed(tmp_path: Path, journal: Journal) -> None:
    app = launch(tmp_path, journal, "--ignore-term", stop_timeout_s=0.5)
    pid = journal.wait_for("started")
    app.stop()
    assert ended(app) is Status.FAILED
    assert app.exit_code() == 128 + signal.SIGKILL
    assert not is_alive(pid)


def test_an_application_whose_supervisor_is_killed_ends_and_counts_as_lost(
    tmp_path: Path, journal: Journal
) -> None:
    app = launch(tmp_path, journal)
    pid = journal.wait_for("started")
    os.kill(app.pid, signal.SIGKILL)
    assert ended(app) is Status.LOST
    eventually(lambda: not is_alive(pid), "the end of the application")
    assert journal.pids("stopped") == [pid]


def test_an_application_is_found_again_by_what_was_stored(tmp_path: Path, journal: Journal) -> None:
    app = launch(tmp_path, journal)
    journal.wait_for("started")
    assert LocalApp.from_json(app.to_json()).status() is Status.RUNNING
    app.stop()
    ended(app)


@pytest.mark.parametrize("changed", [{"host": "another"}, {"started": "earlier"}])
def test_another_process_with_the_same_id_is_not_taken_for_the_application(
    tmp_path: Path, journal: Journal, changed: dict[str, str]
) -> None:
    app = launch(tmp_path, journal)
    pid = journal.wait_for("started")
    other = LocalApp.from_json({**app.to_json(), **changed})
    assert other.status() is Status.LOST
    other.stop()
    assert is_alive(pid)
    app.stop()
    ended(app)


def test_a_log_is_read_on_from_where_the_last_reader_stopped(tmp_path: Path) -> None:
    app = LocalApp("here", 1, "", str(tmp_path))
    log = tmp_path / "app.log"
    log.write_bytes(b"one\ntwo\nthr")
    assert list(app.log().new_lines()) == ["one", "two"]
    with log.open("ab") as more:
        more.write(b"ee\nfour")
    assert list(app.log().new_lines()) == ["three"]
    assert list(app.log().new_lines(ended=True)) == ["four"]
    assert list(app.log().new_lines(ended=True)) == []


def test_a_long_log_is_emptied_once_it_is_forwarded(tmp_path: Path) -> None:
    app = LocalApp("here", 1, "", str(tmp_path))
    log = tmp_path / "app.log"
    lines = 20_000
    log.write_bytes((b"x" * 999 + b"\n") * lines)
    assert sum(1 for _ in app.log().new_lines()) == lines
    assert log.stat().st_size == 0
    with log.open("ab") as more:
        more.write(b"after\n")
    assert list(app.log().new_lines()) == ["after"]


def test_a_line_longer_than_a_chunk_ends_no_reader(tmp_path: Path) -> None:
    app = LocalApp("here", 1, "", str(tmp_path))
    (tmp_path / "app.log").write_bytes(b"y" * (3 << 20) + b"\nnext\n")
    lines = list(app.log().new_lines())
    assert lines[-1] == "next"
    assert sum(map(len, lines[:-1])) == 3 << 20
