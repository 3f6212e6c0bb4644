"""A streaming standby of a server, for tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from demo.postgres import Server, as_owner


@contextmanager
def standby_of(primary: Server, **settings: str) -> Iterator[Server]:
    """A hot standby that follows `primary`, of the same version, with these settings."""
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-standby-") as folder:
        Path(folder).chmod(0o777)
        standby = Server(Path(folder) / "data", settings={"fsync": "off", **settings})
        copy = ["--no-sync", "--checkpoint=fast", "--write-recovery-conf", "--pgdata", str(standby.data)]
        subprocess.run(
            [str(standby.bin / "pg_basebackup"), "--dbname", primary.dsn(), *copy],
            check=True,
            capture_output=True,
            timeout=60,
            cwd="/",
            env={**os.environ, "HOME": folder},
            **as_owner(),
        )
        standby.start()
        yield standby
        standby.stop(immediate=True)
