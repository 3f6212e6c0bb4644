"""A private server, as a process on 127.0.0.1."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from demo.postgres import free_port


class ServerProcess:
    """A server with its own data in `folder`. Subclasses define the program and the check that it answers."""

    name = "the server"
    start_s = 60.0
    stop_s = 30.0

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Write the files that the program reads. Raises RuntimeError if the program is not installed."""

    def command(self) -> list[str]:
        """Return the program with its arguments."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str] | None:
        """Return the environment of the program, or None for that of this process."""
        return None

    def answers(self) -> bool:
        """Return True if the server can be used."""
        raise NotImplementedError

    def start(self) -> None:
        """Start the server with its existing data, and wait until it answers.

        Raises RuntimeError if the program ends, or does not answer within `start_s` seconds.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.prepare()
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                self.command(),
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + self.start_s
        while not self.answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "output").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"{self.name} did not start:\n{said}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Kill the server, as in a crash."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        for one in (number, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, one)
                try:
                    self._process.wait(self.stop_s)
                except subprocess.TimeoutExpired:
                    continue
        self._process = None
