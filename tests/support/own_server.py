"""A PostgreSQL of a test's own, with settings that other tests must not meet."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.postgres import Server


@contextmanager
def running_server(**settings: str) -> Iterator[Server]:
    """A server that runs while the block does; nothing of it is flushed to the disk."""
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-pg-") as folder:
        # PostgreSQL's own user must be able to enter it.
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "data", settings={"fsync": "off", **settings})
        server.create()
        server.start()
        try:
            yield server
        finally:
            server.stop(immediate=True)
