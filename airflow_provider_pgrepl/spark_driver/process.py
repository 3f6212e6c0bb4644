"""LocalApp: a Spark application on this host that lives on when the task which started it dies."""

from __future__ import annotations

import fcntl
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

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.runtime.process_io import LogLine, is_error, parse
from airflow_provider_pgrepl.spark_driver import supervisor

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MARK = "log.forwarded"
_CHUNK_BYTES = 1 << 20
_TAIL_LINES = 20
_POLL_S = 0.2
_REAP_S = 10.0
_children: dict[str, subprocess.Popen[bytes]] = {}
"""Supervisors started by this very process, which alone can reap them, by token."""


def is_process(pid: int, token: str) -> bool:
    """Whether process `pid` runs, and has this token among its arguments."""
    try:
        return token in psutil.Process(pid).cmdline()
    except (psutil.Error, OSError, ValueError, OverflowError):
        return False


def ask_to_end(pid: int, token: str) -> None:
    """SIGTERM to that process, and to no other that may get its id meanwhile."""
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
    """Yield the folders that supervisors of this host name among their arguments. Any process can name any
    folder there: only what lies in the folder says whether one of ours runs."""
    program = Path(supervisor.__file__).name
    for process in psutil.process_iter(["cmdline"]):
        words: list[str] = process.info["cmdline"] or []
        if "--folder" in words and any(Path(word).name == program for word in words[:3]):
            yield Path(words[words.index("--folder") + 1])


def private_folder(path: Path) -> Path:
    """A folder, made where it is not there, which nobody but this user can enter.

    Raises ConfigError for one that cannot be made, is a link, is somebody else's, or was open to others'
    writing: what lies in it then may be anybody's.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = path.lstat()
    except OSError as error:
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
    """Whether there is such a folder."""
    try:
        facts = path.lstat()
    except OSError:
        return False
    return (
        stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and stat.S_IMODE(facts.st_mode) == 0o700
    )


def remove_private_folder(path: Path) -> None:
    """Delete it with all that is in it, if it is one; links in it are not followed."""
    if is_private_folder(path):
        shutil.rmtree(path, ignore_errors=True)


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"the run folder {path} {why}",
        "name a folder that belongs to the user of Airflow's workers alone in Airflow's configuration:"
        " [pgrepl] run_folder, or AIRFLOW__PGREPL__RUN_FOLDER",
    )


class LockedFile:
    """An exclusive lock on a file. Held until `release`, or until all processes that inherited it ended."""

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    @classmethod
    def take(cls, path: Path, holder: str = "") -> LockedFile | None:
        """The lock, with `holder` written into the file; None while somebody has it."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        os.truncate(fd, 0)
        os.write(fd, holder.encode())
        return cls(path, fd)

    def release(self) -> None:
        """Let go of it here; who inherited it keeps it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def holder_of(path: Path) -> str:
    """Who holds it, or held it last, in their own words; empty when unknown."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def is_held(path: Path) -> bool:
    """Whether somebody holds it at this moment."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


class LogTail:
    """Lines of all segments, in order. The folder keeps how far they were read, and the last error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._mark = folder / _MARK
        self._number, self._offset, self.last_error = self._read_mark()
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def new_lines(self, *, ended: bool = False) -> Iterator[LogLine]:
        """Complete lines not read before; with `ended` also an unfinished last one."""
        yield from self._skip_what_is_gone()
        while True:
            # Asked before the segment is read: what it then lacks is in no later one.
            has_next = self._segment(self._number + 1).exists()
            yield from self._lines(ended or has_next)
            if not has_next:
                return
            self._number, self._offset = self._number + 1, 0

    def why(self) -> str:
        """Its last error, for people; its last lines where it had none."""
        return self.last_error or "\n".join(self.last_lines)

    def _lines(self, is_whole: bool) -> Iterator[LogLine]:
        """The segment from where reading stopped; `is_whole` when nothing more will be written to it."""
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
            yield parse("earlier lines were dropped while nobody read them")

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
        self._mark.write_text(json.dumps(mark), encoding="utf-8")


class AppState(Enum):
    """How an application stands, as seen from this host."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Gone without an exit code, or not of this host: nobody can say how it ended."""


@dataclass(frozen=True)
class LocalApp:
    """One detached application: a private folder, whose name is the token that its supervisor is known by.

    All that is known of it lies in the folder. To be found again, the token is enough.
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
        stop_timeout_s: float,
        lock: LockedFile,
    ) -> LocalApp:
        """Start `command` under a supervisor in a session of its own, which holds `lock` while it lives."""
        app = cls(folder)
        options = {
            "--folder": str(folder),
            "--token": app.token,
            "--application": application,
            "--stop-timeout": str(stop_timeout_s),
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
        # It does so itself, too, should this process die here.
        supervisor.write_whole(folder / supervisor.PID, str(process.pid))
        return app

    @property
    def pid(self) -> int | None:
        """Of its supervisor."""
        return _number(self.folder / supervisor.PID)

    def status(self) -> AppState:
        alive = self._alive()  # before the exit code, which is written last
        code = self.exit_code()
        if code is None:
            return AppState.RUNNING if alive else AppState.LOST
        return AppState.DONE if code == 0 else AppState.FAILED

    def exit_code(self) -> int | None:
        """None while it runs, and when it went without leaving one."""
        return _number(self.folder / supervisor.EXIT_CODE)

    @property
    def is_stopping(self) -> bool:
        """Whether somebody has asked it to end."""
        return (self.folder / supervisor.STOPPING).exists()

    def stop(self) -> None:
        """Ask it to end gracefully; returns at once. The supervisor kills it if it takes too long."""
        try:
            (self.folder / supervisor.STOPPING).touch()
        except OSError:  # as on a full disk
            if (pid := self.pid) is not None:
                ask_to_end(pid, self.token)

    def wait(self, timeout_s: float) -> AppState:
        """How it stands when it has ended, or when the time is over."""
        deadline = time.monotonic() + timeout_s
        while self.status() is AppState.RUNNING and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.status()

    def take_charge(self, who: str, timeout_s: float = 0.0) -> LockedFile | None:
        """Become the one that follows it; None while somebody else is. It stops by itself when nobody has
        followed it for some minutes.

        A follower that has lost its own parent lets go within a poll of it: hence the time to wait.
        """
        deadline = time.monotonic() + timeout_s
        while (charge := LockedFile.take(self.folder / supervisor.FOLLOWER, who)) is None:
            if time.monotonic() >= deadline:
                return None
            time.sleep(_POLL_S)
        return charge

    def follower(self) -> str:
        """Who follows it, or did last, in their own words."""
        return holder_of(self.folder / supervisor.FOLLOWER)

    def remove(self) -> None:
        """Delete its folder, once its end is known and its log forwarded."""
        if (supervisor := _children.pop(self.token, None)) is not None:
            # It has written the exit code and ends: without the folder it would seem to run until then.
            with suppress(subprocess.TimeoutExpired):
                supervisor.wait(_REAP_S)
        remove_private_folder(self.folder)

    def log(self) -> LogTail:
        return LogTail(self.folder)

    def last_words(self) -> str:
        """Why it ended, in its own words."""
        log = self.log()
        for _ in log.new_lines(ended=True):
            pass
        return log.why()

    def _alive(self) -> bool:
        # A process that was just started has no arguments yet; this one's own child needs none to be known.
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
