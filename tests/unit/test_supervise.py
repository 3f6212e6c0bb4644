"""spark_driver/supervisor.py in the foreground: a stop goes to the driver, and its exit code comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from airflow_provider_pgrepl.spark_driver import supervisor
from tests.support.replicated import wait_until

DRIVER = """
import signal, sys, time

def end(*_):
    print("ended as asked", flush=True)
    sys.exit(int(sys.argv[1]))

signal.signal(signal.SIGTERM, end)
print("at work", flush=True)
while True:
    time.sleep(1)
"""


def test_a_stop_goes_to_the_driver_alone_and_its_exit_code_comes_back(tmp_path: Path) -> None:
    """SIGTERM would end spark-submit's stand-in, as it ends the JVM."""
    driver = tmp_path / "app.py"
    driver.write_text(DRIVER)
    submit = ["sh", "-c", f"{sys.executable} {driver} 7; exit $?"]
    command = [sys.executable, "-P", supervisor.__file__, "--application", str(driver), "--", *submit]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "at work\n"
        parent.send_signal(signal.SIGTERM)
        assert parent.stdout.read() == "ended as asked\n"
        assert parent.wait() == 7


def test_supervisor_exits_127_and_names_missing_command(tmp_path: Path) -> None:
    missing = str(tmp_path / "spark-submit")
    command = [sys.executable, "-P", supervisor.__file__, "--application", "app.py", "--", missing]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert ended.returncode == 127
    assert f"{missing} cannot be started: No such file" in ended.stderr


REMAINS = """
import ctypes, sys
from airflow_provider_pgrepl.spark_driver import supervisor

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: inherit orphans, as PID 1 does
supervisor._REMAINS_S = float("inf")
submit = ["sh", "-c", 'cat "$0" & echo $!; exit 5', sys.argv[1]]
sys.exit(supervisor.main(["--application", "app.py", "--", *submit]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has prctl")
def test_supervisor_reaps_orphans_that_it_inherits(tmp_path: Path) -> None:
    """Without that, it would wait for them as PID 1 of a container until it may kill them."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    command = [sys.executable, "-c", REMAINS, str(gate)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None
            orphan = psutil.Process(int(parent.stdout.readline()))
            wait_until(lambda: orphan.ppid() == parent.pid, what="the end of the orphan's parent")
            gate.write_text("")
            assert parent.wait(120) == 5
        finally:
            parent.kill()


@pytest.mark.parametrize(("age_s", "stops"), [(0, False), (supervisor.UNFOLLOWED_S + 60, True)])
def test_age_of_last_follower_is_by_the_clock_of_the_file_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, age_s: float, stops: bool
) -> None:
    """The clock of a server of files may differ from this host's: the app would be stopped at a hand-over."""
    for name in (supervisor.PID, supervisor.FOLLOWER):
        (tmp_path / name).touch()
    at = (tmp_path / supervisor.FOLLOWER).stat().st_mtime - age_s
    os.utime(tmp_path / supervisor.FOLLOWER, (at, at))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 3600)
    assert supervisor.Supervisor(["app"], "app.py", tmp_path, 1)._is_to_stop(tmp_path) is stops
