"""A private RabbitMQ from an installed package, without privileges. It listens on 127.0.0.1 only."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

from demo.postgres import free_port
from demo.server_process import ServerProcess

_INSTALLATIONS = Path("/usr/lib/rabbitmq/lib")
_START_S, _STOP_S = 90.0, 30.0


def programs() -> Path | None:
    """Return the folder with the scripts of the newest installation, or None if there is none."""
    found = sorted(_INSTALLATIONS.glob("rabbitmq_server-*/sbin"))
    return found[-1] if found else None


class Broker(ServerProcess):
    """A node with its own data, name server (epmd) and ports. `stop` ends its processes."""

    name = "RabbitMQ"

    def __init__(self, folder: Path, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(folder)
        self._distribution_port, self._epmd_port = free_port(), free_port()
        self._settings = dict(settings or {})

    @property
    def uri(self) -> str:
        return f"amqp://guest:guest@127.0.0.1:{self.port}/%2F"

    def prepare(self) -> None:
        settings = {"loopback_users.guest": "true", "disk_free_limit.absolute": "50MB", **self._settings}
        (self.folder / "rabbitmq.conf").write_text(
            "".join(f"{name} = {value}\n" for name, value in settings.items()), encoding="utf-8"
        )
        (self.folder / "enabled_plugins").write_text("[].\n", encoding="utf-8")

    def command(self) -> list[str]:
        return [self._script("rabbitmq-server")]

    def control(self, *arguments: str) -> str:
        """Run `rabbitmqctl` and return its output."""
        done = subprocess.run(
            [self._script("rabbitmqctl"), "--quiet", *arguments],
            env=self.environment(),
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        return done.stdout

    def stop(self) -> None:
        """Stop the node and its name server."""
        super().stop()
        epmd = shutil.which("epmd")
        if epmd is not None:
            subprocess.run(
                [epmd, "-kill"], env=self.environment(), check=False, capture_output=True, timeout=30
            )

    def answers(self) -> bool:
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

    def environment(self) -> dict[str, str]:
        own = {
            "HOME": self.folder,
            "RABBITMQ_NODENAME": f"pgrepl{self.port}@localhost",
            "RABBITMQ_MNESIA_BASE": self.folder / "data",
            "RABBITMQ_LOG_BASE": self.folder / "log",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": self._distribution_port,
            # By default Erlang's schedulers spin before they sleep, and take the CPU from other programs.
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}"
            " +sbwt none +sbwtdcpu none +sbwtdio none",
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
