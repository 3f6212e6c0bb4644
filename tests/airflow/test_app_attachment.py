"""The app that a task follows: launched, adopted, replaced, waited for or handed over."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import BusyError, Retry, SparkError
from airflow_provider_pgrepl.replication.runtime.file_locks import LockedFile
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.spark_driver import process, supervisor
from airflow_provider_pgrepl.spark_driver.claim import (
    AppAttachment,
    AppRunningError,
    AttachedApp,
    LaunchSpec,
    RunDirectory,
)
from airflow_provider_pgrepl.spark_driver.follow import ApplicationFollower, StoppedError
from airflow_provider_pgrepl.spark_driver.process import (
    AppState,
    LocalApp,
    private_folder,
    supervised_folders,
)
from tests.airflow.conftest import Journal, eventually
from tests.airflow.stand_in_app import SHOP, STAND_IN, Launcher, ended, launch


class Task:
    """A task that wants an app; what it says is kept."""

    def __init__(
        self, place: RunDirectory, launcher: Launcher, order: LaunchSpec | None = None, **how: Any
    ) -> None:
        self.said: list[tuple[int, str]] = []
        self.adoption = AppAttachment(
            place=place,
            order=order or LaunchSpec(SHOP, STAND_IN),
            may_replace=how.pop("may_replace", True),
            is_fresh=how.pop("is_fresh", False),
            stop_timeout_s=60,
            who="task replicate of shop",
            launch=launcher,
            say=how.pop("say", lambda level, text: self.said.append((level, text))),
            await_turn=how.pop("await_turn", lambda _: None),
        )
        self.following = ApplicationFollower(self.adoption, 0.05, **how)

    def take(self) -> AttachedApp:
        return self.adoption.take()


def test_a_new_task_adopts_the_application_that_nobody_follows(place: RunDirectory, journal: Journal) -> None:
    first = Task(place, Launcher(journal)).take()
    journal.wait_for("started")
    first.charge.release()
    second = Task(place, Launcher(journal)).take()
    assert (second.app, second.is_new) == (first.app, False)
    assert len(journal.pids()) == 1
    second.app.stop()
    ended(second.app)


def test_two_tasks_that_begin_at_once_start_one_application(place: RunDirectory, journal: Journal) -> None:
    with place.claim() as claim, pytest.raises(AppRunningError), place.claim():
        pass
    assert not claim.folder.exists(), "nothing was launched"


def test_an_application_that_a_task_follows_is_not_taken_from_it(
    place: RunDirectory, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_pgrepl.spark_driver.claim._CHARGE_WAIT_S", 0.3)
    first = Task(place, Launcher(journal)).take()
    with pytest.raises(BusyError, match="is followed by task replicate of shop already"):
        Task(place, Launcher(journal)).take()
    assert first.app.status() is AppState.RUNNING
    first.app.stop()
    ended(first.app)


CHANGED = LaunchSpec(
    Pipeline(name="shop", lake=SHOP.lake, tables=SHOP.tables, flush_interval_s=9.0), STAND_IN
)


def test_an_application_of_other_parameters_that_nobody_follows_is_replaced(
    place: RunDirectory, journal: Journal
) -> None:
    first = Task(place, Launcher(journal)).take()
    first.charge.release()
    journal.wait_for("started")
    task = Task(place, Launcher(journal), CHANGED)
    second = task.take()
    journal.wait_for("started", count=2)
    assert second.is_new
    assert journal.pids("stopped") == journal.pids("started")[:1]
    assert [text for level, text in task.said if level == logging.WARNING] == [
        "The app that runs, started with other values of pipeline flush_interval_s, is stopped for a new one"
    ]
    second.app.stop()
    ended(second.app)


def test_success_of_an_application_of_other_parameters_is_not_that_of_the_task(
    place: RunDirectory, journal: Journal
) -> None:
    first = Task(place, Launcher(journal, "--exit", "0")).take()
    ended(first.app)
    same, other = Task(place, Launcher(journal)), Task(place, Launcher(journal), CHANGED)
    assert same.following.status(first.app.token) is AppState.DONE
    assert other.following.status(first.app.token) is AppState.LOST
    first.charge.release()


def test_full_disk_of_the_worker_ends_no_application_and_is_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / supervisor.LOG_PATTERN.format(0)).write_text("one\n")
    monkeypatch.setattr(Path, "write_text", full)
    assert [line.text for line in process.LogTail(tmp_path).new_lines()] == ["one"]
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(SparkError, match="No space left") as caught:
        private_folder(tmp_path / "run")
    assert caught.value.retry is Retry.TIMED


def test_fresh_start_stops_running_application_and_launches_new_one(
    place: RunDirectory, journal: Journal
) -> None:
    first = Task(place, Launcher(journal)).take()
    first.charge.release()
    journal.wait_for("started")
    second = Task(place, Launcher(journal), may_replace=False, is_fresh=True).take()
    assert second.is_new
    assert journal.pids("stopped") == journal.pids("started")[:1]
    second.app.stop()
    ended(second.app)


@pytest.mark.parametrize("arguments", [[], ["--tables", "public.a"]], ids=["same tables", "other tables"])
def test_copy_waits_for_the_end_of_a_copy_that_another_task_follows_and_names_it(
    place: RunDirectory, journal: Journal, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr("airflow_provider_pgrepl.spark_driver.claim._CHARGE_WAIT_S", 0.1)
    first = Task(place, Launcher(journal), may_replace=False).take()
    journal.wait_for("started")
    pid = first.app.pid
    said: list[str] = []

    def end_the_first(_: int, text: str) -> None:
        said.append(text)
        assert first.app.status() is AppState.RUNNING
        first.app.stop()

    order = LaunchSpec(SHOP, STAND_IN, arguments)
    second = Task(place, Launcher(journal), order, may_replace=False, say=end_the_first).take()
    assert second.is_new
    assert said == [
        f"Waiting for the end of replicate of pipeline shop, process {pid} on this host,"
        " last followed by task replicate of shop"
    ]
    journal.wait_for("started", count=2)
    assert journal.pids("stopped") == journal.pids("started")[:1]
    second.app.stop()
    ended(second.app)


def test_copy_that_lost_its_task_is_adopted_by_the_task_that_waits_for_it(
    place: RunDirectory, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_provider_pgrepl.spark_driver.claim._CHARGE_WAIT_S", 0.1)
    first = Task(place, Launcher(journal), may_replace=False).take()
    said = lambda *_: first.charge.release()  # noqa: E731
    second = Task(place, Launcher(journal), may_replace=False, say=said).take()
    assert (second.app, second.is_new) == (first.app, False)
    second.app.stop()
    ended(second.app)


def test_task_that_is_asked_to_stop_while_it_waits_ends_and_leaves_the_copy_alone(
    place: RunDirectory, journal: Journal
) -> None:
    first = Task(place, Launcher(journal), may_replace=False).take()
    waiting: list[ApplicationFollower] = []
    order = LaunchSpec(SHOP, STAND_IN, ["--tables", "public.a"])
    say = lambda *_: waiting[0].stop()  # noqa: E731
    waiting.append(Task(place, Launcher(journal), order, may_replace=False, say=say).following)
    with pytest.raises(StoppedError):
        waiting[0].begin()
    assert not first.app.is_stopping
    first.app.stop()
    ended(first.app)


def test_task_waits_for_its_turn_before_it_launches(place: RunDirectory, journal: Journal) -> None:
    """An app on another host may hold the pipeline's lock."""
    task = Task(place, Launcher(journal), await_turn=lambda _: journal.path.write_text(""))
    found = task.take()
    assert journal.path.exists()
    found.app.stop()
    ended(found.app)


@pytest.mark.parametrize(
    "changed",
    [
        {"arguments": ["--until"]},
        {"application": "other.py"},
        {"settings": ["--master", "local[1]"]},
        {"environment": {"PGREPL_DSN": "host=other"}},
        {"environment": {}},
    ],
)
def test_launch_difference_is_detected_without_storing_environment_values(
    tmp_path: Path, changed: dict[str, Any]
) -> None:
    fields: dict[str, Any] = {"pipeline": SHOP, "application": STAND_IN, "environment": {"PGREPL_DSN": "se"}}
    LaunchSpec(**fields).write(tmp_path)
    assert LaunchSpec(**fields).differences(tmp_path) == []
    assert len(LaunchSpec(**{**fields, **changed}).differences(tmp_path)) == 1
    assert "PGREPL_DSN" in (tmp_path / "order.json").read_text()
    assert '"se"' not in (tmp_path / "order.json").read_text()


def test_an_application_that_is_ending_is_waited_for(
    place: RunDirectory, journal: Journal, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    first = Task(place, Launcher(journal, "--end-gate", str(gate))).take()
    journal.wait_for("started")
    first.app.stop()
    first.charge.release()

    def open_when_waited_for(level: int, text: str) -> None:
        assert text == "Waiting for the app that is ending"
        assert journal.pids("stopped") == []
        gate.touch()

    second = Task(place, Launcher(journal), say=open_when_waited_for).take()
    assert gate.exists(), "the task waited"
    assert second.is_new
    journal.wait_for("started", count=2)
    assert journal.pids("stopped") == journal.pids("started")[:1]
    second.app.stop()
    ended(second.app)


def test_an_application_that_is_asked_to_end_while_its_lock_is_awaited_is_not_adopted(
    place: RunDirectory, journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task set to another state leaves one: its process asks the app to end, then releases it."""
    gate = tmp_path / "gate"
    first = Task(place, Launcher(journal, "--end-gate", str(gate))).take()
    journal.wait_for("started")
    lock_follower = LocalApp.lock_follower

    def ended_meanwhile(app: LocalApp, who: str, timeout_s: float = 0.0) -> LockedFile | None:
        if app == first.app:
            app.stop()
            first.charge.release()
        return lock_follower(app, who, timeout_s)

    monkeypatch.setattr(LocalApp, "lock_follower", ended_meanwhile)
    said: list[str] = []

    def open_when_waited_for(_: int, text: str) -> None:
        said.append(text)
        gate.touch()

    second = Task(place, Launcher(journal), say=open_when_waited_for).take()
    assert said == ["Waiting for the app that is ending"]
    assert second.is_new
    second.app.stop()
    ended(second.app)


def test_an_application_is_found_though_the_connection_has_another_name_now(
    place: RunDirectory, journal: Journal, tmp_path: Path
) -> None:
    first = Task(place, Launcher(journal)).take()
    first.charge.release()
    journal.wait_for("started")
    renamed = replace(SHOP, conn_id="other")
    task = Task(
        RunDirectory(tmp_path / "run", "replicate", renamed), Launcher(journal), LaunchSpec(renamed, STAND_IN)
    )
    second = task.take()
    assert second.is_new
    assert "started with other values of pipeline conn_id, is stopped for a new one" in task.said[0][1]
    assert first.app.status() is not AppState.RUNNING
    second.app.stop()
    ended(second.app)


@pytest.mark.parametrize("order", [LaunchSpec(SHOP, STAND_IN), CHANGED], ids=["adopted", "replaced"])
def test_application_of_another_run_folder_is_found(
    place: RunDirectory, journal: Journal, tmp_path: Path, order: LaunchSpec
) -> None:
    """Airflow may have been killed, and started with another `[pgrepl] run_folder`."""
    first = Task(place, Launcher(journal)).take()
    first.charge.release()
    journal.wait_for("started")
    moved = RunDirectory(tmp_path / "moved", "replicate", SHOP)
    assert RunDirectory(tmp_path / "moved", "snapshot", SHOP).elsewhere() is None
    assert RunDirectory(tmp_path / "moved", "replicate", replace(SHOP, lake="/other")).elsewhere() is None
    second = Task(moved, Launcher(journal), order).take()
    assert second.is_new is (order is CHANGED)
    assert (second.app == first.app) is (order is not CHANGED)
    assert (first.app.status() is AppState.RUNNING) is (order is not CHANGED)
    assert moved.find(second.app.token) == second.app
    second.app.stop()
    ended(second.app)


def test_removed_application_does_not_seem_to_run_while_its_supervisor_still_ends(tmp_path: Path) -> None:
    """A supervisor writes the exit code before its own process has gone."""
    app = LocalApp(private_folder(tmp_path / f"pgrepl-{'0' * 32}"))
    supervisor.write_whole(app.folder / supervisor.EXIT_CODE, "0")
    process._children[app.token] = subprocess.Popen(["sleep", "0.5"])
    app.remove()
    assert app.status() is AppState.LOST


@pytest.mark.parametrize("variable", ["PGREPL_DSN", "AWS_ENDPOINT_URL_S3"])
def test_application_of_another_source_or_store_is_neither_adopted_nor_stopped(
    place: RunDirectory, journal: Journal, tmp_path: Path, variable: str
) -> None:
    """Another Airflow of this user may have a pipeline of this name, with the same path at another store."""
    here, there = (LaunchSpec(SHOP, STAND_IN, environment={variable: value}) for value in ("here", "there"))
    first = Task(place, Launcher(journal), there).take()
    first.charge.release()
    journal.wait_for("started")
    moved = RunDirectory(tmp_path / "moved", "replicate", SHOP)
    with pytest.raises(BusyError, match=f"variable {variable}") as caught:
        Task(moved, Launcher(journal), here).take()
    assert str(first.app.folder) in caught.value.message
    assert first.app.status() is AppState.RUNNING
    first.app.stop()
    ended(first.app)


def test_folder_that_a_process_of_others_names_is_no_application(place: RunDirectory, tmp_path: Path) -> None:
    """Only what lies in the folder says whether an app of this package runs."""
    token = f"pgrepl-{'0' * 32}"
    folder = tmp_path / "theirs" / "host" / place.folder.name / token
    folder.mkdir(parents=True, mode=0o700)
    program = tmp_path / "supervisor.py"
    program.write_text("import sys; sys.stdin.read()")
    command = [sys.executable, str(program), "--folder", str(folder), "--token", token]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        eventually(lambda: folder in set(supervised_folders()), "the process")
        assert place.elsewhere() is None
        assert place.find(token) is None
        assert process.stdin is not None
        process.stdin.close()
        process.wait(120)


def test_new_task_logs_exit_code_and_last_lines_from_unfollowed_application(
    place: RunDirectory, journal: Journal
) -> None:
    first = Task(place, Launcher(journal, "--exit", "78")).take()
    ended(first.app)
    first.charge.release()
    task = Task(place, Launcher(journal))
    second = task.take()
    [(level, text)] = [said for said in task.said if "An earlier" in said[1]]
    assert level == logging.WARNING
    assert "exit code 78" in text
    assert "the last words" in text
    assert not first.app.folder.exists()
    second.app.stop()
    ended(second.app)


def test_an_application_that_is_handed_over_goes_on_until_nobody_comes(
    place: RunDirectory, journal: Journal
) -> None:
    task = Task(place, Launcher(journal, unfollowed_s=600), hand_over_after_s=0.5)
    end = task.following.follow(task.following.begin())
    assert end.handed_over
    [app] = place.apps()
    assert app.status() is AppState.RUNNING
    journal.wait_for("started")

    second = Task(place, Launcher(journal)).take()
    assert second.app == app
    follower = app.folder / supervisor.FOLLOWER
    long_ago = time.time() - 700  # less than the default
    os.utime(follower, (long_ago, long_ago))
    eventually(lambda: follower.stat().st_mtime > long_ago + 1, "the supervisor to see its follower")
    assert not app.is_stopping

    second.charge.release()
    os.utime(follower, (long_ago, long_ago))
    assert ended(app) is AppState.DONE
    assert journal.pids("stopped") == journal.pids("started")


def test_a_stop_that_comes_before_a_task_is_in_charge_reaches_the_application(
    place: RunDirectory, journal: Journal
) -> None:
    app = launch(place, journal)
    journal.wait_for("started")
    following = Task(place, Launcher(journal)).following
    following.stop()
    assert following.follow(app.token).status is AppState.DONE
    assert journal.pids("stopped") == journal.pids("started")
