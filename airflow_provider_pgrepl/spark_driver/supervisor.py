"""The parent of one local Spark application: passes a stop on, keeps its log, leaves its exit code.

    python supervise.py --folder F --token T --application APP.py --stop-timeout S --lock-fd N \\
        -- spark-submit … APP.py …
    python supervise.py --application APP.py -- spark-submit … APP.py …

The first is detached: it outlives the Airflow task that started it, so that the application does, too, and so
that whoever comes next learns how it ended. The second stays in the foreground of who called it, a shell or a
container: the application's output is its own. SIGTERM goes to the application's Python driver and not to
spark-submit: that is a JVM, which would die at once and take its driver along half-way through a commit. An
application that has not ended `--stop-timeout` seconds later is killed. Imports nothing of this package: it
is run by its path.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]

PID, EXIT_CODE, STOPPING, FOLLOWER = "pid", "exit_code", "stopping", "follower"
LOG_PATTERN = "log-{:08d}"
SEGMENT_BYTES = 4 << 20
KEPT_SEGMENTS = 8
UNFOLLOWED_S = 900.0
"""How long an application goes on that no task follows: handed over, or its task was killed."""

_POLL_S = 0.2
_LOOK_S = 5.0
_REMAINS_S = 10.0
_CHUNK_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1


class SegmentedLog:
    """What the application writes, in files of bounded size, of which the oldest go: one may run for months.

    Segments end at line ends. A disk that is full loses lines, and holds nobody up.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, kept: int = KEPT_SEGMENTS) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._kept = kept
        self._number = 0
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append; begin a new segment at the last line end once this one is full."""
        end = data.rfind(b"\n") + 1
        is_full = self._size + len(data) >= self._segment_bytes
        if not is_full or not (end or self._size > 2 * self._segment_bytes):
            self._append(data)
            return
        cut = end or len(data)
        self._append(data[:cut])
        self._number, self._size = self._number + 1, 0
        self._segment(self._number - self._kept).unlink(missing_ok=True)
        self._append(data[cut:])

    def _append(self, data: bytes) -> None:
        with contextlib.suppress(OSError), self._segment(self._number).open("ab") as file:
            file.write(data)
        self._size += len(data)

    def _segment(self, number: int) -> Path:
        return self._folder / LOG_PATTERN.format(number)


class Supervisor:
    """Runs one command in a process group of its own until it ends."""

    def __init__(
        self, command: list[str], application: str, folder: Path | None, stop_timeout_s: float
    ) -> None:
        """`folder`: where log, stop request and exit code are; None in the foreground."""
        self._command = command
        self._application = application
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._stop_at: float | None = None
        self._told: set[int] = set()
        self._next_look = 0.0

    def run(self) -> int:
        """Run to the end and give the exit code, 128 + n for signal n as a shell would."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                signal.signal(number, self._ask_to_stop)
        log = None if self._folder is None else SegmentedLog(self._folder)
        try:
            child = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=None if log is None else subprocess.PIPE,
                stderr=None if log is None else subprocess.STDOUT,
                process_group=0,
                preexec_fn=_end_with_parent,
            )
        except OSError as error:
            text = f"{self._command[0]} cannot be started: {error.strerror}\n"
            sys.stderr.write(text) if log is None else log.write(text.encode())
            return 127
        pump = threading.Thread(target=_pump, args=(child, log), daemon=True)
        if log is not None:
            pump.start()
        while child.poll() is None:
            time.sleep(_POLL_S)
            if self._stop_at is None and self._folder is not None and self._is_to_stop(self._folder):
                self._ask_to_stop()
            if self._stop_at is not None:
                self._stop(child.pid)
        _end_remains(child.pid)
        if log is not None:
            pump.join(_REMAINS_S)
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _is_to_stop(self, folder: Path) -> bool:
        """Return True if it was asked to stop, or if no task has followed it for long."""
        with contextlib.suppress(OSError):
            if (folder / STOPPING).exists():
                return True
            # Seldom: as long as somebody follows, each look writes the time of a file.
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + _LOOK_S
                return _is_unfollowed(folder / FOLLOWER)
        return False

    def _ask_to_stop(self, *_: object) -> None:
        if self._stop_at is None:
            self._stop_at = time.monotonic() + self._stop_timeout_s
            if self._folder is not None:
                with contextlib.suppress(OSError):
                    (self._folder / STOPPING).touch()

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


def _pump(child: subprocess.Popen[bytes], log: SegmentedLog) -> None:
    """Write down what the application and its children say, until none of them is left to say anything."""
    assert child.stdout is not None
    while chunk := os.read(child.stdout.fileno(), _CHUNK_BYTES):
        log.write(chunk)


def _is_unfollowed(follower: Path) -> bool:
    """Whether nobody has held the follower's lock for UNFOLLOWED_S; the file's time says since when."""
    fd = os.open(follower, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.utime(fd)
        return False
    finally:
        os.close(fd)
    return time.time() - follower.stat().st_mtime > UNFOLLOWED_S


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


def write_whole(path: Path, text: str) -> None:
    """Write a file that a reader sees whole or not at all."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def main(argv: list[str]) -> int:
    """Start the application, pass signals on, and return its exit code, which the folder gets, too."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, help="without it, in the foreground")
    parser.add_argument("--token", help="by which this process is known")
    parser.add_argument("--application", required=True)
    parser.add_argument("--stop-timeout", type=float, default=float("inf"))
    parser.add_argument("--lock-fd", type=int, help="kept open, and its lock held, to the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.folder is not None:
        write_whole(options.folder / PID, str(os.getpid()))
    code = Supervisor(options.command, options.application, options.folder, options.stop_timeout).run()
    if options.folder is not None:
        write_whole(options.folder / EXIT_CODE, str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
