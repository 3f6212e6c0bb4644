"""Starts of Spark queue on a host. Real processes hold the lock files."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn

HOLD = """
import sys, time
from pathlib import Path
from airflow_provider_pgrepl.replication.runtime.start_queue import StartTurn
folder, name = Path(sys.argv[1]), sys.argv[2]
with StartTurn(name, folder=folder, slots=1):
    with (folder / "journal").open("a") as journal:
        print("begin", name, file=journal, flush=True)
        if sys.argv[3] == "hang":
            print("held", flush=True)
            time.sleep(3600)
        time.sleep(0.2)
        print("end", name, file=journal, flush=True)
"""


def start(folder: Path, name: str, behavior: str = "end") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", HOLD, str(folder), name, behavior]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def held_by(folder: Path, name: str) -> subprocess.Popen[str]:
    process = start(folder, name, "hang")
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_starts_of_three_processes_do_not_overlap(tmp_path: Path) -> None:
    for process in [start(tmp_path, name) for name in ("a", "b", "c")]:
        assert process.wait(300) == 0
    lines = (tmp_path / "journal").read_text().splitlines()
    assert [line.split()[0] for line in lines] == ["begin", "end"] * 3
    assert [line.split()[1] for line in lines[::2]] == [line.split()[1] for line in lines[1::2]]


def test_killed_process_lets_the_next_start_begin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    holder = held_by(tmp_path, "replicate shop")
    turn = StartTurn("replicate crm", folder=tmp_path, slots=1)
    entered = threading.Thread(target=turn.__enter__)
    entered.start()
    while "waiting for the start of replicate shop" not in caplog.text:
        assert entered.is_alive()
    holder.kill()
    holder.wait()
    entered.join(300)
    assert (tmp_path / "start-0").read_text() == "replicate crm"
    turn.__exit__()


def test_another_slot_is_taken_at_once(tmp_path: Path) -> None:
    with StartTurn("a", folder=tmp_path, slots=2), StartTurn("b", folder=tmp_path, slots=2):
        assert (tmp_path / "start-1").read_text() == "b"


def test_wait_ends_at_its_limit_and_on_request(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        StartTurn("replicate shop", folder=tmp_path, slots=1),
        StartTurn("replicate crm", folder=tmp_path, slots=1, limit_s=0.0),
    ):
        assert "the start of replicate shop has not ended within 0 s" in caplog.text
        with StartTurn("replicate hr", lambda: True, folder=tmp_path, slots=1):
            assert (tmp_path / "start-0").read_text() == "replicate shop"


def test_host_without_lock_files_has_no_queue(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    turn = StartTurn("a", folder=missing, slots=1)
    with turn, StartTurn("b", folder=missing, slots=1):
        turn.await_turn()
