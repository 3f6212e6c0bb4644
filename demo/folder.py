"""The folder `.demo/` with all files of the demo, and the lock that lets only one demo use it."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from demo.errors import DemoError
from demo.postgres import may_enter

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Folder:
    """The paths below the demo's root. The next start deletes all of them except Airflow's empty database."""

    root: Path
    _lock: TextIO | None = field(default=None, repr=False)

    @property
    def postgres(self) -> Path:
        """PostgreSQL's data directory.

        It is below /var/tmp if the demo runs as root and PostgreSQL's user may not enter the root folder.
        """
        if may_enter(self.root):
            return self.root / "postgres"
        return Path("/var/tmp") / f"pgrepl-demo-{hashlib.sha256(bytes(self.root)).hexdigest()[:12]}"

    @property
    def airflow(self) -> Path:
        return self.root / "airflow"

    @property
    def lake(self) -> Path:
        return self.root / "lake"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def temporary(self) -> Path:
        return self.root / "tmp"

    @property
    def broker(self) -> Path:
        return self.root / "broker"

    @property
    def store(self) -> Path:
        return self.root / "store"

    @property
    def pipeline(self) -> Path:
        return self.root / "pipeline.json"

    def claim(self) -> None:
        """Lock the folder for this process. Raises DemoError if another demo holds the lock."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o755)
            self._lock = (self.root / "lock").open("a+")
        except OSError as error:
            raise DemoError(f"Cannot write in {self.root}: {error.strerror}.") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            holder = self._lock.read().strip() or "unknown"
            raise DemoError(
                f"A demo is already running here (process {holder}). End it with Ctrl-C in its terminal,"
                f" or with: kill {holder}"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def clear(self) -> None:
        """Remove the data of the previous demo. Raises DemoError if a folder cannot be removed."""
        made = (self.airflow, self.lake, self.logs, self.temporary)
        for path in (self.postgres, *made, self.broker, self.store):
            shutil.rmtree(path, ignore_errors=True)
            if path.exists():
                raise DemoError(f"Cannot remove {path}; is it another user's? Remove it: sudo rm -rf {path}")
        for path in made:
            path.mkdir()
