"""LocalApp: a Spark application on this host that lives on when the task which started it dies."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from airflow_provider_pgrepl.operators import supervise

_LOG = "app.log"
_EXIT = "exit_code"
_OFFSET = "app.log.forwarded"
_SHRINK_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 20
_TAIL_LINES = 20

_children: dict[int, subprocess.Popen[bytes]] = {}
"""Supervisors started by this very process, which alone can reap them."""


class Status(Enum):
    """How an application stands, as seen from this host."""

    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    LOST = "lost"
    """Gone without an exit code, or on another host: nobody can say how it ended."""


@dataclass(frozen=True)
class LocalApp:
    """One detached application; `to_json` is what a later try needs to find it.

    A process id alone may by then belong to another process or another host, hence host and start time.
    """

    host: str
    pid: int
    started: str
    folder: str

    @classmethod
    def launch(
        cls,
        command: Sequence[str],
        application: str,
        env: Mapping[str, str],
        folder: Path,
        stop_timeout_s: float,
    ) -> LocalApp:
        """Start `command` under a supervisor in a session of its own; log and exit code go to `folder`."""
        supervisor = [sys.executable, "-P", supervise.__file__]
        options = ["--exit-file", str(folder / _EXIT), "--application", application]
        with (folder / _LOG).open("ab") as log:
            process = subprocess.Popen(
                [*supervisor, *options, "--stop-timeout", str(stop_timeout_s), "--", *command],
                env=dict(env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _children[process.pid] = process
        return cls(socket.gethostname(), process.pid, _start_of(process.pid) or "", str(folder))

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> LocalApp:
        return cls(**fields)

    def status(self) -> Status:
        if self.host != socket.gethostname():
            return Status.LOST
        alive = self._alive()
        code = self.exit_code()
        if code is None:
            return Status.RUNNING if alive else Status.LOST
        return Status.DONE if code == 0 else Status.FAILED

    def exit_code(self) -> int | None:
        """None while it runs, and when it went without leaving one."""
        try:
            return int(Path(self.folder, _EXIT).read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return None

    def stop(self) -> None:
        """Ask it to end gracefully; returns at once. The supervisor kills it if it takes too long."""
        if self.host == socket.gethostname() and self._alive():
            os.kill(self.pid, signal.SIGTERM)

    def remove(self) -> None:
        """Delete its folder, once its end is known and its log forwarded."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def log(self) -> LogTail:
        return LogTail(Path(self.folder))

    def _alive(self) -> bool:
        if (child := _children.get(self.pid)) is not None and child.poll() is not None:
            del _children[self.pid]
            return False
        return _start_of(self.pid) == self.started


class LogTail:
    """The application's log from where the last reader, perhaps of an earlier try, stopped."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / _LOG
        self._mark = folder / _OFFSET
        self.last_lines: deque[str] = deque(maxlen=_TAIL_LINES)

    def new_lines(self, *, ended: bool = False) -> Iterator[str]:
        """Complete lines not read before; with `ended` also an unfinished last one."""
        try:
            with self._log.open("rb") as log:
                yield from self._lines(log, ended)
        except FileNotFoundError:
            return

    def _lines(self, log: Any, ended: bool) -> Iterator[str]:
        offset = self._offset()
        while True:
            log.seek(offset)
            chunk = log.read(_CHUNK_BYTES)
            whole = chunk.rfind(b"\n") + 1
            if ended or (not whole and len(chunk) == _CHUNK_BYTES):
                whole = len(chunk)
            for raw in chunk[:whole].splitlines():
                line = raw.decode("utf-8", errors="replace").rstrip()
                self.last_lines.append(line)
                yield line
            offset += whole
            if whole:
                self._mark.write_text(str(offset), encoding="ascii")
            if whole < _CHUNK_BYTES // 2:
                break
        self._shrink(offset)

    def _offset(self) -> int:
        try:
            return int(self._mark.read_text(encoding="ascii"))
        except (FileNotFoundError, ValueError):
            return 0

    def _shrink(self, offset: int) -> None:
        """Empty the file when all of it is forwarded: an application may run for months."""
        if offset < _SHRINK_BYTES or self._log.stat().st_size != offset:
            return
        # The writer appends, so that it goes on at the new end.
        os.truncate(self._log, 0)
        self._mark.write_text("0", encoding="ascii")


def _start_of(pid: int) -> str | None:
    """What tells this process from others that had or will have the same id; None when it has ended."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        if sys.platform != "linux":
            return str(process.create_time())
        # In ticks since boot: a time of day would move when the clock is set.
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return f"{boot}/{stat.rpartition(')')[2].split()[19]}"
    except (psutil.Error, OSError):
        return None
