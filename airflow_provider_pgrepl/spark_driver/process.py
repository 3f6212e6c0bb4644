"""LocalApp: a Spark application on this host that lives on when the task which started it dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from airflow_provider_pgrepl.spark_driver import supervisor
from airflow_provider_pgrepl.spark_driver.locked_file import LockedFile, holder_of
from airflow_provider_pgrepl.spark_driver.log_tail import LogTail
from airflow_provider_pgrepl.spark_driver.private_folder import remove_private_folder
from airflow_provider_pgrepl.spark_driver.processes import ask_to_end, is_process

_POLL_S = 0.2
_REAP_S = 10.0

_children: dict[str, subprocess.Popen[bytes]] = {}
"""Supervisors started by this very process, which alone can reap them, by token."""


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
