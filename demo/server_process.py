"""A server of one's own, as a process on 127.0.0.1."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from demo.postgres import free_port


class ServerProcess:
    """One with its own data in `folder`. Kinds say what is run, and when it answers."""

    name = "the server"
    start_s = 60.0
    stop_s = 30.0

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Write what its program reads. Raises RuntimeError where it is not installed."""

    def command(self) -> list[str]:
        """Its program, with arguments."""
        raise NotImplementedError

    def environment(self) -> Mapping[str, str] | None:
        """None: this process's."""
        return None

    def answers(self) -> bool:
        """Whether it can be used."""
        raise NotImplementedError

    def start(self) -> None:
        """Start it, with the data that it has, and wait until it answers."""
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
        """End it as a crash would."""
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
