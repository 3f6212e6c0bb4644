"""A real schema registry for tests, with the interface of Confluent's."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.server_process import ServerProcess

_APP = Path(__file__).resolve().parents[2] / ".registry" / "app"
_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs a schema registry: sh setup/registry.sh"


class Registry(ServerProcess):
    """Apicurio's; it keeps schemas in memory alone."""

    name = "the schema registry"

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}/apis/ccompat/v7"

    def command(self) -> list[str]:
        (runner,) = _APP.glob("*-runner.jar")
        options = ("-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
        return [shutil.which("java") or "java", *options, "-jar", str(runner)]

    def environment(self) -> Mapping[str, str]:
        # Otherwise it requests news from its vendor's host.
        quiet = {"QUARKUS_REST_CLIENT_LOGGING_SCOPE": "none", "QUARKUS_LOG_LEVEL": "WARN"}
        return {
            **os.environ,
            **quiet,
            "QUARKUS_HTTP_HOST": "127.0.0.1",
            "QUARKUS_HTTP_PORT": str(self.port),
        }

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/subjects", timeout=1):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def keep_compatible(self, level: str = "BACKWARD") -> None:
        """Require each version of a subject to read the one before it, as Confluent's does by default."""
        request = urllib.request.Request(
            f"{self.uri}/config",
            json.dumps({"compatibility": level}).encode(),
            {"Content-Type": "application/vnd.schemaregistry.v1+json"},
            method="PUT",
        )
        with urllib.request.urlopen(request, timeout=10):
            pass


@contextmanager
def running_registry() -> Iterator[Registry]:
    """Yield a private registry. Skips the test where it is missing, unless it is required."""
    if not _APP.is_dir() or shutil.which("java") is None:
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-registry-") as folder:
        registry = Registry(Path(folder))
        registry.start()
        try:
            registry.keep_compatible()
            yield registry
        finally:
            registry.stop()
