"""Toxiproxy: a proxy that slows, slices, stalls, resets and cuts the connections to a server of this host."""

from __future__ import annotations

import json
import os
import re
import tempfile
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from demo.postgres import free_port
from demo.server_process import ServerProcess
from tests.support.s3 import REQUIRED, await_built

PROGRAM = Path(__file__).parents[2] / ".toxiproxy" / "toxiproxy"
_WHY = "needs toxiproxy: sh setup/toxiproxy.sh"

TOXICS: Mapping[str, Mapping[str, Any]] = {
    "latency": {"latency": 150, "jitter": 100},
    "bandwidth": {"rate": 200},
    "slicer": {"average_size": 200, "size_variation": 100, "delay": 500},
    # Nothing passes; the connection is closed when the toxic is removed.
    "timeout": {"timeout": 0},
    "reset_peer": {"timeout": 300},
    "limit_data": {"bytes": 20_000},
}
"""Toxics with their attributes: milliseconds, KB/s, bytes, and microseconds between slices."""
CUT = "cut"
FAULTS = (*TOXICS, CUT)
ENDING = ("timeout", "reset_peer", "limit_data", CUT)
"""The faults that end a connection: at once, as data passes, or when they are removed."""


@dataclass(frozen=True)
class Link:
    """A connection through the proxy to a server, at 127.0.0.1:`port`."""

    api: str
    name: str
    port: int

    @contextmanager
    def suffering(self, fault: str) -> Iterator[None]:
        """Apply a fault of FAULTS in both directions during the block. A cut also closes all connections.

        The end of the block ends the faults of all links of the proxy.
        """
        try:
            if fault == CUT:
                _ask(f"{self.api}/proxies/{self.name}", {"enabled": False})
            else:
                for stream in ("upstream", "downstream"):
                    toxic = {"type": fault, "name": stream, "stream": stream, "attributes": TOXICS[fault]}
                    _ask(f"{self.api}/proxies/{self.name}/toxics", toxic)
            yield
        finally:
            _ask(f"{self.api}/reset", {})

    def of(self, dsn: str) -> str:
        """Return a connection string that leads through the proxy."""
        return re.sub(r"port=\d+", f"port={self.port}", dsn)


class Toxiproxy(ServerProcess):
    """A Toxiproxy server."""

    name = "toxiproxy"

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def command(self) -> list[str]:
        return [str(PROGRAM), "-host", "127.0.0.1", "-port", str(self.port)]

    def answers(self) -> bool:
        try:
            _ask(f"{self.api}/version")
        except OSError:
            return False
        return True

    def link(self, name: str, server_port: int) -> Link:
        """Return a new connection to a server, without faults."""
        port = free_port()
        places = {"listen": f"127.0.0.1:{port}", "upstream": f"127.0.0.1:{server_port}"}
        _ask(f"{self.api}/proxies", {"name": name, "enabled": True, **places})
        return Link(self.api, name, port)


@contextmanager
def running_toxiproxy() -> Iterator[Toxiproxy]:
    """Yield a proxy. Skips the test where it is not built, unless it is required."""
    await_built()
    if not PROGRAM.exists():
        assert not os.environ.get(REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-toxiproxy-") as folder:
        proxy = Toxiproxy(Path(folder))
        proxy.start()
        try:
            yield proxy
        finally:
            proxy.stop()


def _ask(url: str, body: Mapping[str, Any] | None = None) -> bytes:
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url, data), timeout=30) as answer:
        return bytes(answer.read())
