"""The detached parent of one local Spark application: passes a stop on, and leaves the exit code in a file.

    python supervise.py --exit-file F --application APP.py --stop-timeout S -- spark-submit … APP.py …

It outlives the Airflow task that started it, so that the application does, too, and so that whoever comes
next learns how it ended. SIGTERM goes to the application's Python driver and not to spark-submit: that is a
JVM, which would die at once and take its driver along half-way through a commit. An application that has not
ended `--stop-timeout` seconds later is killed. Imports nothing of this package: it is run by its path.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

_POLL_S = 0.2
_REMAINS_S = 10.0
_PR_SET_PDEATHSIG = 1


class Supervisor:
    """Runs one command in a process group of its own until it ends."""

    def __init__(self, command: list[str], application: str, stop_timeout_s: float) -> None:
        self._command = command
        self._application = application
        self._stop_timeout_s = stop_timeout_s
        self._stop_at: float | None = None
        self._told: set[int] = set()

    def run(self) -> int:
        """Run to the end and give the exit code, 128 + n for signal n as a shell would."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._ask_to_stop)
        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            sys.stderr.write(f"{self._command[0]} cannot be started: {error.strerror}\n")
            return 127
        while child.poll() is None:
            time.sleep(_POLL_S)
            if self._stop_at is not None:
                self._stop(child.pid)
        _end_remains(child.pid)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _ask_to_stop(self, *_: object) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_timeout_s

    def _stop(self, pid: int) -> None:
        assert self._stop_at is not None
        if time.monotonic() > self._stop_at:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            return
        # The driver may not be there yet: spark-submit starts it seconds after itself.
        for driver in _drivers(pid, self._application):
            if driver.pid not in self._told:
                self._told.add(driver.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    driver.send_signal(signal.SIGTERM)


def _drivers(pid: int, application: str) -> list[psutil.Process]:
    """The Python processes that run the application, below `pid` or `pid` itself."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if "python" in process.name() and application in process.cmdline():
                    found.append(process)
    return found


def _end_remains(group: int) -> None:
    """Give what the application left behind a moment, then kill it: nothing may write on after the end."""
    deadline = time.monotonic() + _REMAINS_S
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _end_with_parent() -> None:
    """In the child before it starts: ask Linux for a SIGTERM should this supervisor be killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exit-file", type=Path, required=True)
    parser.add_argument("--application", required=True)
    parser.add_argument("--stop-timeout", type=float, required=True)
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    code = Supervisor(options.command, options.application, options.stop_timeout).run()
    unfinished = options.exit_file.with_suffix(".tmp")
    unfinished.write_text(str(code), encoding="ascii")
    unfinished.replace(options.exit_file)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
