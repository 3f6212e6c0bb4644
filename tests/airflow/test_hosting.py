"""Apps on this host: real processes, real signals."""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import BusyError, ConfigError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.spark_driver import process, supervisor
from airflow_provider_pgrepl.spark_driver.claim import (
    AppAttachment,
    AppReservation,
    AppRunningError,
    AttachedApp,
    LaunchSpec,
    RunDirectory,
)
from airflow_provider_pgrepl.spark_driver.follow import ApplicationFollower, StoppedError
from airflow_provider_pgrepl.spark_driver.process import (
    AppState,
    LocalApp,
    LockedFile,
    ask_to_end,
    private_folder,
    supervised_folders,
)
from tests.airflow.conftest import Journal, eventually, is_alive

STAND_IN = str(Path(__file__).parent / "stand_in.py")
SHOP = Pipeline(name="shop", lake="/lake", tables=("public.*",))


@pytest.fixture
def place(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run", "replicate", SHOP)


class Launcher:
    """Starts the stand-in with some arguments."""

    def __init__(self, journal: Journal, *arguments: str, stop_timeout_s: float = 20) -> None:
        self._journal = journal
        self._arguments = arguments
        self._stop_timeout_s = stop_timeout_s

    def __call__(self, claim: AppReservation) -> LocalApp:
        file = claim.folder / "pipeline.json"
        file.write_text('{"name": "shop"}', encoding="utf-8")
        command = [sys.executable, STAND_IN, "--pipeline", str(file), "--journal", str(self._journal.path)]
        environment = {**os.environ, "PGREPL_DSN": "host=nowhere"}
        return claim.launch([*command, *self._arguments], STAND_IN, environment, self._stop_timeout_s)


def launch(place: RunDirectory, journal: Journal, *arguments: str, stop_timeout_s: float = 20) -> LocalApp:
    with place.claim() as claim:
        return Launcher(journal, *arguments, stop_timeout_s=stop_timeout_s)(claim)


def ended(app: LocalApp) -> AppState:
    eventually(lambda: app.status() is not AppState.RUNNING, "the end of the app")
    return app.status()


def texts(app: LocalApp, **how: bool) -> list[str]:
    return [line.text for line in app.log().new_lines(**how)]


# --- one app ---


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
    eventually(lambda: not is_alive(pid), "the end of the app")
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


# --- its log ---


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


# --- which app a task follows ---


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
            stop_timeout_s=20,
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
    Pipeline(name="shop", lake="/lake", tables=("public.*",), flush_interval_s=9.0), STAND_IN
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
    task = Task(place, Launcher(journal), hand_over_after_s=0.5)
    end = task.following.follow(task.following.begin())
    assert end.handed_over
    [app] = place.apps()
    assert app.status() is AppState.RUNNING
    journal.wait_for("started")

    second = Task(place, Launcher(journal)).take()
    assert second.app == app
    follower = app.folder / supervisor.FOLLOWER
    long_ago = time.time() - supervisor.UNFOLLOWED_S - 60
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
