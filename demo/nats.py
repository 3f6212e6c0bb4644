"""A private NATS server with JetStream from the machine's package, on 127.0.0.1 alone."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from demo.postgres import free_port

_START_S, _STOP_S = 30.0, 20.0


def program() -> str | None:
    """Where nats-server is; None when it is not installed."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/bin")


class NatsServer:
    """One server with its own data. `settings`: further lines of its configuration."""

    def __init__(self, folder: Path, settings: str = "") -> None:
        self.folder, self.settings = folder, settings
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, with the data that it has, and wait until it answers."""
        found = program()
        if found is None:
            raise RuntimeError("NATS is not installed: sh setup/nats.sh")
        self.folder.mkdir(parents=True, exist_ok=True)
        file = self.folder / "nats.conf"
        file.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.folder / "data"}" }}\n'
            f"{self.settings}\n",
            encoding="utf-8",
        )
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [found, "-c", str(file)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                said = (self.folder / "output").read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"NATS did not start:\n{said}")
            time.sleep(0.05)

    def kill(self) -> None:
        """End the server as a crash would."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        for one in (number, signal.SIGKILL):
            if self._process.poll() is None:
                self._process.send_signal(one)
                try:
                    self._process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    continue
        self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False
