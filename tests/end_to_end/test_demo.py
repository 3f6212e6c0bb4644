"""`make demo EXIT=1`, small: real PostgreSQL, Airflow, Spark and lake."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from demo import nats, processes
from demo.postgres import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.thorough(
    "test_first_steps.py, unit/test_demo.py, and for each broker integration/test_demo_events.py"
)
def test_demo_ends_with_every_row_equal_and_leaves_nothing_running():
    # Not pytest's folder: PostgreSQL's own user must be able to enter it.
    with tempfile.TemporaryDirectory(prefix="pgrepl-demo-") as folder:
        Path(folder).chmod(0o755)
        options = ["--exit", "--scale", "1", "--duration", "5", "--rate", "100", "--folder", f"{folder}/demo"]
        events = ["--events", "nats"] if nats.program() else []
        ports = ["--pg-port", str(free_port()), "--airflow-port", str(free_port())]
        command = [sys.executable, "-m", "demo", *options, *events, *ports]
        # Other tests of this process have an Airflow of their own.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
        code, output = ended(command, environment, Path(folder) / "demo" / "logs")
        assert code == 0, output
        assert "EQUAL: every row of every table" in output
        assert "balanced at" in output
        assert not events or "pgbench_accounts: " in output.split("rebuilt from events, equal")[0]
        assert running_with(f"PGREPL_DEMO={folder}/demo") == []


def ended(command: list[str], environment: dict[str, str], logs: Path) -> tuple[int, str]:
    """Return exit code and output; one that takes too long is ended as by Ctrl-C, for nothing may go on."""
    demo = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        output, _ = demo.communicate(timeout=780)
    except subprocess.TimeoutExpired:
        demo.terminate()
        output, _ = demo.communicate(timeout=100)
    if demo.returncode != 0:
        output += f"\nAirflow's log ends with\n{processes.tail(logs / 'airflow.log')}"
    return demo.returncode, output


def running_with(variable: str) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found
