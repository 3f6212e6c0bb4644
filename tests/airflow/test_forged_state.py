"""A task's state that a user forged in Airflow makes its next try delete nothing and signal no process."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from tests.airflow.conftest import LAKE, Journal, is_alive

pytestmark = pytest.mark.usefixtures("airflow_db")

HERE = Path(__file__).parent


class StateDatabase:
    """A task's state, as a user left it."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def get(self, key: str) -> Any:
        return self.value

    def set(self, key: str, value: Any) -> None:
        self.value = value


def operator(journal: Journal, *arguments: str, mode: str = "caught_up") -> PgReplicationOperator:
    return PgReplicationOperator(
        task_id="replicate",
        mode=mode,
        pipeline={"name": "shop", "tables": ["public.*"], "lake": LAKE},
        application=str(HERE / "stand_in.py"),
        application_args=["--journal", str(journal.path), *arguments],
        spark_binary=str(HERE / "spark-submit-stand-in"),
        preflight=False,
        poll_interval_s=0.1,
        stop_timeout_s=60,
    )


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A folder of another program, which looks like that of an app that has ended well."""
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "exit_code").write_text("0")
    (folder / "app.log").write_text("a line\n")
    (folder / "precious").write_text("data")
    return folder


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
    yield process
    process.kill()
    process.wait()


def started(pid: int) -> str:
    """Return the boot ID and start time of a process, which the kernel shows to every user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[19]}"


def forged(victim: Path, **changed: Any) -> dict[str, Any]:
    here = {"host": socket.gethostname(), "pid": 4_000_000, "started": "x", "folder": str(victim)}
    return {**here, **changed}


@pytest.mark.parametrize(
    "handle",
    [
        lambda victim: forged(victim),
        lambda victim: forged(victim, started=None),
        lambda victim: forged(victim, host="another"),
        lambda victim: forged(victim, pid=-1),
        lambda victim: str(victim),
        lambda victim: f"../../../../../../../../..{victim}",
        lambda victim: f"pgrepl-{'0' * 32}/../../../../../../../..{victim}",
        lambda victim: f"pgrepl-{'0' * 32}",
        lambda victim: f"pgrepl-{'0' * 32}\n",
        lambda victim: "pgrepl-..",
        lambda victim: {"token": str(victim)},
        lambda victim: [str(victim)],
        lambda victim: 7,
    ],
)
def test_a_forged_handle_deletes_nothing_and_the_try_starts_its_own_application(
    victim: Path, journal: Journal, handle: Any
) -> None:
    state_db = StateDatabase(handle(victim))
    operator(journal, "--exit", "0").execute({"task_state_store": state_db})
    assert sorted(path.name for path in victim.iterdir()) == ["app.log", "exit_code", "precious"]
    assert len(journal.pids()) == 1
    assert isinstance(state_db.value, str)


def test_a_forged_handle_signals_nobody(
    victim: Path, bystander: subprocess.Popen[bytes], journal: Journal
) -> None:
    (victim / "exit_code").unlink()
    handle = forged(victim, pid=bystander.pid, started=started(bystander.pid))
    task = operator(journal, mode="continuous")
    ended: list[str] = []

    def run() -> None:
        try:
            task.execute({"task_state_store": StateDatabase(handle)})
        except Exception as error:
            ended.append(str(error))

    running = threading.Thread(target=run)
    running.start()
    journal.wait_for("started")
    task.on_kill()
    running.join(300)
    assert not running.is_alive()
    assert is_alive(bystander.pid)
    assert journal.pids("stopped") == journal.pids("started")
    assert all("stopped on request" in text for text in ended), ended
