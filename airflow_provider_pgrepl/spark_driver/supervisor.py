"""The parent process of a local app. It forwards a stop, and stores log and exit code.

    python supervisor.py --folder F --token T --application APP.py --stop-timeout S --unfollowed-timeout S \\
        --lock-fd N -- spark-submit … APP.py …
    python supervisor.py --application APP.py -- spark-submit … APP.py …

The first form is detached: supervisor and app outlive the Airflow task that started them, and the
next task reads the exit code. The second form runs in the foreground of a shell or a container, and the
app writes to its standard output.

On a stop, the supervisor sends SIGTERM to the Python driver and not to spark-submit. spark-submit is a JVM:
it would exit at once and end the driver in the middle of a commit. After `--stop-timeout` seconds the
app is killed. This file is run by its path and imports nothing of this package.
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
"""Seconds for which an app continues without a follower, after a hand-over or a killed task; a default."""

_POLL_S = 0.2
_CHECK_S = 5.0
_REMAINS_S = 10.0
_CHUNK_BYTES = 64 << 10
_PR_SET_PDEATHSIG = 1


class SegmentedLog:
    """A log in segments of bounded size. The oldest segments are deleted: an app may run for months.

    Segments end at line ends, unless a line is longer than two segments. If the disk is full, lines are lost,
    and the app is not blocked.
    """

    def __init__(self, folder: Path, segment_bytes: int = SEGMENT_BYTES, kept: int = KEPT_SEGMENTS) -> None:
        self._folder = folder
        self._segment_bytes = segment_bytes
        self._kept = kept
        self._number = 0
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append `data`. Once the segment is full, start a new one after the last line end."""
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
    """The run of one command, from start to end, in its own process group."""

    def __init__(
        self,
        command: list[str],
        application: str,
        folder: Path | None,
        stop_timeout_s: float,
        unfollowed_s: float = UNFOLLOWED_S,
    ) -> None:
        """:param folder: the folder of log, stop request and exit code; None in the foreground"""
        self._command = command
        self._application = application
        self._folder = folder
        self._stop_timeout_s = stop_timeout_s
        self._unfollowed_s = unfollowed_s
        self._stop_at: float | None = None
        self._signaled: set[int] = set()
        self._next_check = 0.0

    def run(self) -> int:
        """Run the command to its end and return its exit code: 128 + n for signal n, as in a shell.

        Returns 127 if the command cannot be started.
        """
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup ignores SIGHUP
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
        """Return True if the app was asked to stop, or had no follower for `unfollowed_s` seconds."""
        with contextlib.suppress(OSError):
            if (folder / STOPPING).exists():
                return True
            # Check this less often: while a task follows, each check updates the modification time of a file.
            if time.monotonic() >= self._next_check:
                self._next_check = time.monotonic() + _CHECK_S
                return _is_unfollowed(folder, self._unfollowed_s)
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
        # The driver may not run yet: spark-submit starts it some seconds after its own start.
        for driver in _drivers(pid, self._application):
            if driver.pid not in self._signaled:
                self._signaled.add(driver.pid)
                with contextlib.suppress(psutil.NoSuchProcess):
                    driver.send_signal(signal.SIGTERM)


def _pump(child: subprocess.Popen[bytes], log: SegmentedLog) -> None:
    """Write the output of the app and its children to the log until all of them have closed it."""
    assert child.stdout is not None
    while chunk := os.read(child.stdout.fileno(), _CHUNK_BYTES):
        log.write(chunk)


def _is_unfollowed(folder: Path, limit_s: float) -> bool:
    """Return True if the follower lock was free for more than `limit_s` seconds.

    The file's modification time is the last time at which the lock was found held. Raises OSError.
    """
    follower = folder / FOLLOWER
    fd = os.open(follower, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        os.utime(fd)
        return False
    finally:
        os.close(fd)
    # A network file system dates files by its server's clock, which may differ from this host's.
    os.utime(folder / PID)
    return (folder / PID).stat().st_mtime - follower.stat().st_mtime > limit_s


def _drivers(pid: int, application: str) -> list[psutil.Process]:
    """Return the Python processes that run the app: `pid` and its descendants."""
    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                if "python" in process.name() and application in process.cmdline():
                    found.append(process)
    return found


def _end_remains(group: int) -> None:
    """Wait up to 10 s for the rest of the process group to end, then kill it.

    No process of the app may write after its end.
    """
    deadline = time.monotonic() + _REMAINS_S
    while time.monotonic() < deadline:
        _reap(group)
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return
        time.sleep(_POLL_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _reap(group: int) -> None:
    """Remove the ended processes of a group that this process inherited, as PID 1 of a container does.

    Until then they count as members of the group.
    """
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-group, os.WNOHANG) != (0, 0):
            pass


def _end_with_parent() -> None:
    """Ask Linux to send SIGTERM to this process if the supervisor dies.

    Called in the child before it runs the command. Does nothing on other systems.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def write_whole(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees all of `text` or nothing of it."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def main(argv: list[str]) -> int:
    """Run the app, forward signals to it, and return its exit code.

    With `--folder`, write the pid of this process and the exit code into the folder.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--folder", type=Path, help="for log, stop request and exit code; default: run in the foreground"
    )
    parser.add_argument("--token", help="identifies this process")
    parser.add_argument("--application", required=True)
    parser.add_argument("--stop-timeout", type=float, default=float("inf"))
    parser.add_argument("--unfollowed-timeout", type=float, default=UNFOLLOWED_S)
    parser.add_argument("--lock-fd", type=int, help="kept open, and its lock held, to the end")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(argv)
    if options.folder is not None:
        write_whole(options.folder / PID, str(os.getpid()))
    timeouts = options.stop_timeout, options.unfollowed_timeout
    code = Supervisor(options.command, options.application, options.folder, *timeouts).run()
    if options.folder is not None:
        write_whole(options.folder / EXIT_CODE, str(code))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
