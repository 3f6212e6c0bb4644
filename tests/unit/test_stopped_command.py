"""`pgrepl replicate`, `publish` and `snapshot` in a shell or a container: a stop, and its exit code.

spark-submit's stand-in is a shell, which ends at SIGTERM at once, as the JVM does.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]
import pytest

from tests.support.replicated import kill

ROOT = Path(__file__).resolve().parents[2]
DRIVER = """
import os, signal, subprocess, sys, time

def end(*_):
    time.sleep(1)  # a parent that does not wait ends before
    print("driver finished", flush=True)
    sys.exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, end)
if "--leave-worker" in sys.argv:
    # A worker that outlives its parents, as pyspark.daemon does for a moment.
    subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
print("driver works", flush=True)
while True:
    time.sleep(1)
"""
SUBMIT = """#!/bin/sh
"{python}" "{driver}" {code} "$@"
exit $?
"""
ISOLATED = ("unshare", "--pid", "--fork", "--mount-proc")
"""Runs a command as PID 1 of its own namespace, as in a container."""


def can_isolate() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ISOLATED, "true"], check=False, capture_output=True).returncode == 0


@contextmanager
def started(
    folder: Path, arguments: list[str], code: int, prefix: tuple[str, ...] = ()
) -> Iterator[tuple[subprocess.Popen[str], IO[str]]]:
    """Yield the process of a command whose driver works, and its output."""
    (folder / "driver.py").write_text(DRIVER, "utf-8")
    submit = folder / "spark-submit"
    submit.write_text(SUBMIT.format(python=sys.executable, driver=folder / "driver.py", code=code), "utf-8")
    submit.chmod(0o755)
    file = folder / "shop.json"
    lake = str(folder / "lake")
    file.write_text(json.dumps({"name": "shop", "lake": lake, "tables": ["public.*"]}), encoding="utf-8")
    name, *more = arguments
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    with subprocess.Popen(
        [*prefix, sys.executable, "-m", "airflow_provider_pgrepl", name, str(file), *more],
        cwd=ROOT,
        env={**os.environ, "PGREPL_DSN": "host=/nowhere", "PATH": path},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "driver works\n"
            yield process, process.stdout
        finally:
            kill(process)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["replicate"], 0), (["publish", "--publisher", "events"], 0), (["snapshot"], 75)],
    ids=["replicate", "publish", "snapshot"],
)
def test_stopped_command_waits_for_its_driver_and_ends_with_its_code(
    tmp_path: Path, arguments: list[str], code: int, stop: int
) -> None:
    with started(tmp_path, arguments, code) as (process, output):
        process.send_signal(stop)
        assert output.read() == "driver finished\n"
        assert process.wait() == code


@pytest.mark.skipif(not can_isolate(), reason="this user cannot make a PID namespace: run as root")
@pytest.mark.parametrize("more", [[], ["--", "--leave-worker"]], ids=["driver", "driver and a worker"])
def test_stopped_command_waits_for_its_driver_as_pid_1_of_a_container(
    tmp_path: Path, more: list[str]
) -> None:
    """The kernel ignores a signal to PID 1 that has no handler, and PID 1 inherits orphans."""
    with started(tmp_path, ["replicate", *more], 0, ISOLATED) as (process, output):
        (init,) = psutil.Process(process.pid).children()
        init.send_signal(signal.SIGTERM)
        assert output.read() == "driver finished\n"
        assert process.wait() == 0
