"""A private RabbitMQ from the machine's package, run without privileges, on 127.0.0.1 alone."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from demo.postgres import free_port

_INSTALLATIONS = Path("/usr/lib/rabbitmq/lib")
_START_S, _STOP_S = 90.0, 30.0


def programs() -> Path | None:
    """The folder of the newest installation's scripts; None when there is none."""
    found = sorted(_INSTALLATIONS.glob("rabbitmq_server-*/sbin"))
    return found[-1] if found else None


class Broker:
    """One node with its own data, name server and ports; none of it outlives `stop`."""

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.port, self._distribution_port, self._epmd_port = (free_port() for _ in range(3))
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def start(self) -> None:
        """Start the node, with the data that it has, and wait until it answers."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings = {"loopback_users.guest": "true", "disk_free_limit.absolute": "50MB", **self._settings}
        (self.folder / "rabbitmq.conf").write_text(
            "".join(f"{name} = {value}\n" for name, value in settings.items()), encoding="utf-8"
        )
        (self.folder / "enabled_plugins").write_text("[].\n", encoding="utf-8")
        with (self.folder / "output").open("ab") as output:
            self._process = subprocess.Popen(
                [self._script("rabbitmq-server")],
                env=self._environment(),
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
                raise RuntimeError(f"RabbitMQ did not start:\n{said}")
            time.sleep(0.2)

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl`; what it prints."""
        done = subprocess.run(
            [self._script("rabbitmqctl"), "--quiet", *arguments],
            env=self._environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def kill(self) -> None:
        """End the node as a crash would."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """End the node, and its name server."""
        self._signal(signal.SIGTERM)
        epmd = shutil.which("epmd")
        if epmd is not None:
            subprocess.run(
                [epmd, "-kill"], env=self._environment(), check=False, capture_output=True, timeout=30
            )

    def _signal(self, number: int) -> None:
        if self._process is None:
            return
        for one in (number, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, one)
                try:
                    self._process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    continue
        self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False

    def _script(self, name: str) -> str:
        found = programs()
        if found is None:
            raise RuntimeError("RabbitMQ is not installed: sh setup/rabbitmq.sh")
        return str(found / name)

    def _environment(self) -> dict[str, str]:
        own = {
            "HOME": self.folder,
            "RABBITMQ_NODENAME": f"pgrepl{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": self._distribution_port,
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_CONFIG_FILE": self.folder / "rabbitmq",
            "RABBITMQ_ENABLED_PLUGINS_FILE": self.folder / "enabled_plugins",
            "RABBITMQ_PID_FILE": self.folder / "pid",
            "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": self._epmd_port,
        }
        return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"} | {
            name: str(value) for name, value in own.items()
        }
