"""A private NATS server with JetStream, from an installed package. It listens on 127.0.0.1 only."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from demo.server_process import ServerProcess


def program() -> str | None:
    """Return the path of nats-server, or None if it is not installed."""
    return shutil.which("nats-server") or shutil.which("nats-server", path="/usr/sbin:/usr/local/bin")


class NatsServer(ServerProcess):
    """A server with its own data. `settings`: more lines of its configuration."""

    name, start_s, stop_s = "NATS", 30.0, 20.0

    def __init__(self, folder: Path, settings: str = "") -> None:
        super().__init__(folder)
        self.settings = settings

    @property
    def uri(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def prepare(self) -> None:
        self._file.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.folder / "data"}" }}\n'
            f"{self.settings}\n",
            encoding="utf-8",
        )

    def command(self) -> list[str]:
        found = program()
        if found is None:
            raise RuntimeError("NATS is not installed: sh setup/nats.sh")
        return [found, "-c", str(self._file)]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    @property
    def _file(self) -> Path:
        return self.folder / "nats.conf"
