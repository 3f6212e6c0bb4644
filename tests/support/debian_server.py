"""PostgreSQL as Debian packages it, which the embedded one does not replace: it has contrib and PostGIS."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.postgres import Server
from tests.support.replicated import execute
from tests.support.sessions import close_sessions

EXTENSIONS = ("hstore", "citext", "ltree", "cube", "seg", "isn", "postgis")
TEMPLATE = "with_extensions"
"""A database that has them all."""

_INSTALLATIONS = Path("/usr/lib/postgresql")
_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = (
    "needs Debian's PostgreSQL with contrib and PostGIS: sh setup/postgresql.sh, or"
    " apt-get install postgresql-15 postgresql-15-postgis-3"
)


def programs() -> Path | None:
    """Return the newest installation with all extensions, or None."""
    for folder in sorted(_INSTALLATIONS.glob("*/bin"), key=lambda path: int(path.parent.name), reverse=True):
        share = Path("/usr/share/postgresql") / folder.parent.name / "extension"
        has_all = all((share / f"{name}.control").exists() for name in EXTENSIONS)
        if has_all and (folder / "initdb").exists():
            return folder
    return None


@contextmanager
def debian_cluster() -> Iterator[Server]:
    """Yield a private cluster. Skips the test where the packages are missing, unless they are required."""
    found = programs()
    if found is None:
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-debian-") as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "data", programs=found, settings={"fsync": "off"})
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop(immediate=True)


@contextmanager
def debian_server() -> Iterator[Server]:
    """Yield a private cluster with the database TEMPLATE."""
    with debian_cluster() as server:
        execute(server.dsn(), f"create database {TEMPLATE}")
        execute(server.dsn(TEMPLATE), *(f"create extension {name}" for name in EXTENSIONS))
        close_sessions(server.dsn(TEMPLATE))
        yield server
