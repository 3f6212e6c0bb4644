"""A detached app on this host. It keeps running if the task that started it dies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from airflow_provider_pgrepl.errors import ConfigError, SparkError
from airflow_provider_pgrepl.replication.runtime.file_locks import LockedFile, holder_of
from airflow_provider_pgrepl.replication.runtime.process_io import LogLine, is_error, parse

from . import supervisor

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EIO)
_MARK = "log.forwarded"
_CHUNK_BYTES = 1 << 20
_TAIL_LINES = 20
_POLL_S = 0.2
_REAP_S = 10.0
_children: dict[str, subprocess.Popen[bytes]] = {}
"""The supervisors that this process started, by token. Only their parent process can reap them."""


def is_process(pid: int, token: str) -> bool:
    """Return True if process `pid` runs and has this token among its arguments."""
    try:
        return token in psutil.Process(pid).cmdline()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False


def ask_to_end(pid: int, token: str) -> None:
    """Send SIGTERM to process `pid` if it has this token among its arguments.

    Where the system has pidfds, the signal cannot reach another process that gets the same pid.
    """
    if not hasattr(os, "pidfd_open"):
        if is_process(pid, token):
            os.kill(pid, signal.SIGTERM)
        return
    try:
        handle = os.pidfd_open(pid)
    except (OSError, ValueError, OverflowError):
        return
    try:
        if is_process(pid, token):
            signal.pidfd_send_signal(handle, signal.SIGTERM)
    except ProcessLookupError:
        pass
    finally:
        os.close(handle)


def supervised_folders() -> Iterator[Path]:
    """Yield the folders that supervisors on this host name among their arguments.

    Any process can name any folder there. Check the content of the folder before you trust it.
    """
    program = Path(supervisor.__file__).name
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if "--folder" in words and any(Path(word).name == program for word in words[:3]):
            yield Path(words[words.index("--folder") + 1])


def private_folder(path: Path) -> Path:
    """Create the folder with mode 0700 if it is missing, and return its path.

    Raises ConfigError if it cannot be created, is a link, or belongs to another user. Also raises ConfigError
    if other users can write to it, because they may have put files there. Other modes are set to 0700.
    Raises SparkError, after which a retry may help, if the disk is full or fails.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
        if error.errno in _TEMPORARY:
            raise SparkError(
                f"the run folder {path} cannot be made now: {error.strerror}",
                "free space on this worker's disk, or repair it; a retry then starts the app",
            ) from None
        raise _refused(path, f"cannot be made: {error.strerror}") from None
    if not stat.S_ISDIR(facts.st_mode):
        raise _refused(path, "is a link, not a folder")
    if facts.st_uid != os.geteuid():
        raise _refused(
            path, f"belongs to user {facts.st_uid}, not to user {os.geteuid()}, who runs this task"
        )
    if facts.st_mode & _OTHERS_WRITE:
        raise _refused(path, "can be written in by other users")
    if stat.S_IMODE(facts.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def is_private_folder(path: Path) -> bool:
    """Return True if `path` is a folder of this user with mode 0700, and not a link."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700
    )


def remove_private_folder(path: Path) -> None:
    """Delete a private folder and its content without following links. Does nothing for another path."""
    if is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the run folder {path} {why}",
        "name a folder that belongs to the user of Airflow's workers alone in Airflow's configuration:"
        " [pgrepl] run_folder, or AIRFLOW__PGREPL__RUN_FOLDER",
    )


class LogTail:
    """The lines of all log segments, in order. The folder stores the read position and the last error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = folder / _MARK
        self._number, self._offset, self.last_error = self._read_mark()
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def new_lines(self, *, ended: bool = False) -> Iterator[LogLine]:
        """Yield the complete lines not read before; if `ended`, also an unfinished last line."""
        yield from self._skip_what_is_gone()
        while True:
            # Check this before reading: if there is a next segment, this one is complete.
            has_next = self._segment(self._number + 1).exists()
            yield from self._lines(ended or has_next)
            if not has_next:
                return
            self._number, self._offset = self._number + 1, 0

    def why(self) -> str:
        """Return the last error line, or up to 20 last lines if there was no error."""
        return self.last_error or "\n".join(self.last_lines)

    def _lines(self, is_whole: bool) -> Iterator[LogLine]:
        """Yield the lines of the current segment from the read position.

        :param is_whole: True if nothing more will be written to the segment
        """
        try:
            segment = self._segment(self._number).open("rb")
        except FileNotFoundError:
            return
        with segment:
            while True:
                segment.seek(self._offset)
                chunk = segment.read(_CHUNK_BYTES)
                whole = chunk.rfind(b"\n") + 1
                if (is_whole and len(chunk) < _CHUNK_BYTES) or (not whole and len(chunk) == _CHUNK_BYTES):
                    whole = len(chunk)
                if not whole:
                    return
                for raw in chunk[:whole].splitlines():
                    yield self._noted(parse(raw.decode("utf-8", errors="replace").rstrip()))
                self._offset += whole
                self._write_mark()

    def _noted(self, line: LogLine) -> LogLine:
        self.last_lines.append(line.text)
        if is_error(line):
            self.last_error = line.text
        return line

    def _skip_what_is_gone(self) -> Iterator[LogLine]:
        oldest = min((int(path.name.rpartition("-")[2]) for path in self._folder.glob("log-*")), default=0)
        if oldest > self._number:
            self._number, self._offset = oldest, 0
            yield parse("earlier log lines were dropped before a task read them")

    def _segment(self, number: int) -> Path:
        return self._folder / supervisor.LOG_PATTERN.format(number)

    def _read_mark(self) -> tuple[int, int, str]:
        try:
            mark = json.loads(self._mark.read_text(encoding="utf-8"))
            return int(mark["segment"]), int(mark["offset"]), str(mark["error"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0, ""

    def _write_mark(self) -> None:
        mark = {"segment": self._number, "offset": self._offset, "error": self.last_error}
        # A full disk must not end the app. Without the mark, a later task forwards these lines once more.
        with suppress(OSError):
            self._mark.write_text(json.dumps(mark), encoding="utf-8")


class AppState(Enum):
    """The state of an app, as seen from this host."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """The app does not run and left no exit code, or is not of this host: its outcome is unknown."""


@dataclass(frozen=True)
class LocalApp:
    """A detached app, represented by its private folder.

    The folder holds everything that is known about the app. Its name is the token that identifies the
    supervisor, and the token is enough to find the app again.
    """

    folder: Path

    @property
    def token(self) -> str:
        return self.folder.name

    @classmethod
    def launch(
        cls,
        command: Sequence[str],
        application: str,
        env: Mapping[str, str],
        folder: Path,
        lock: LockedFile,
        stop_timeout_s: float,
        unfollowed_s: float,
    ) -> LocalApp:
        """Start `command` under a supervisor, which has its own session and holds `lock` until it ends."""
        app = cls(folder)
        options = {
            "--folder": str(folder),
            "--token": app.token,
            "--application": application,
            "--stop-timeout": str(stop_timeout_s),
            "--unfollowed-timeout": str(unfollowed_s),
            "--lock-fd": str(lock.fd),
        }
        process = subprocess.Popen(
            [
                *(sys.executable, "-P", supervisor.__file__),
                *(word for option in options.items() for word in option),
                *("--", *command),
            ],
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(lock.fd,),
        )
        _children[app.token] = process
        # The supervisor also writes this file, in case this process dies first.
        supervisor.write_whole(folder / supervisor.PID, str(process.pid))
        return app

    @property
    def pid(self) -> int | None:
        """Return the pid of its supervisor, or None if it is not recorded."""
        return _number(self.folder / supervisor.PID)

    def status(self) -> AppState:
        alive = self._alive()  # check this before the exit code, which is written last
        code = self.exit_code()
        if code is None:
            return AppState.RUNNING if alive else AppState.LOST
        return AppState.DONE if code == 0 else AppState.FAILED

    def exit_code(self) -> int | None:
        """Return the exit code. None while the app runs, and if it ended without recording one."""
        return _number(self.folder / supervisor.EXIT_CODE)

    @property
    def is_stopping(self) -> bool:
        """Return True if the app was asked to end."""
        return (self.folder / supervisor.STOPPING).exists()

    def stop(self) -> None:
        """Ask the app to end gracefully, and return at once.

        The supervisor kills it if it has not ended after its stop timeout.
        """
        try:
            (self.folder / supervisor.STOPPING).touch()
        except OSError:  # as on a full disk
            if (pid := self.pid) is not None:
                ask_to_end(pid, self.token)

    def wait(self, timeout_s: float) -> AppState:
        """Wait up to `timeout_s` seconds for the end of the app, and return its state."""
        deadline = time.monotonic() + timeout_s
        while self.status() is AppState.RUNNING and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.status()

    def lock_follower(self, who: str, timeout_s: float = 0.0) -> LockedFile | None:
        """Take the follower lock of the app for the follower `who`.

        Waits up to `timeout_s` seconds. Returns the lock, or None if another process still holds it. A
        follower whose parent has died releases it within one poll interval, so that waiting helps. The
        supervisor stops an app whose follower lock was free for too long.
        """
        deadline = time.monotonic() + timeout_s
        while (charge := LockedFile.take(self.folder / supervisor.FOLLOWER, who)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        return charge

    def follower(self) -> str:
        """Return the name of the current or last follower, or "" if it is unknown."""
        return holder_of(self.folder / supervisor.FOLLOWER)

    def remove(self) -> None:
        """Delete the folder of the app. Call this once its end is known and its log is forwarded.

        If this process started the supervisor, wait up to 10 s for the supervisor to end.
        """
        if (supervisor := _children.pop(self.token, None)) is not None:
            # The supervisor has written the exit code and is ending. Without the folder, the app
            # would seem to run until then.
            with suppress(subprocess.TimeoutExpired):
                supervisor.wait(_REAP_S)
        remove_private_folder(self.folder)

    def log(self) -> LogTail:
        return LogTail(self.folder)

    def last_words(self) -> str:
        """Read the rest of the log. Return the last error line, or up to 20 last lines if there was none."""
        log = self.log()
        for _ in log.new_lines(ended=True):
            pass
        return log.why()

    def _alive(self) -> bool:
        # A process that was just started has no arguments yet. Check a child of this process by its handle.
        if (child := _children.get(self.token)) is not None:
            if child.poll() is None:
                return True
            del _children[self.token]
            return False
        return (pid := self.pid) is not None and is_process(pid, self.token)


def _number(path: Path) -> int | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor, encoding="ascii", errors="replace") as file:
        text = file.read(32)
    return int(text) if text.isascii() and text.isdigit() else None
