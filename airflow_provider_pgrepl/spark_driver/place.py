"""Place: where the one application of a pipeline lives on this host."""

from __future__ import annotations

import hashlib
import re
import secrets
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.spark_driver.locked_file import LockedFile
from airflow_provider_pgrepl.spark_driver.private_folder import (
    is_private_folder,
    private_folder,
    remove_private_folder,
)
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp
from airflow_provider_pgrepl.spark_driver.processes import supervised_folders

_TOKEN = re.compile(r"pgrepl-[0-9a-f]{32}")
_LOCK = "lock"


class PlaceTakenError(Exception):
    """An application lives there, or is just being started."""


@dataclass(frozen=True)
class Claim:
    """A place that nobody has, and a folder for the application that is to live there."""

    folder: Path
    _lock: LockedFile

    def launch(
        self, command: Sequence[str], application: str, env: Mapping[str, str], stop_timeout_s: float
    ) -> LocalApp:
        """Start it; it has the place from now on, whatever becomes of this process."""
        return LocalApp.launch(command, application, env, self.folder, stop_timeout_s, self._lock)


class Place:
    """A private folder with one of its own for each application that was started: of these one may run."""

    def __init__(self, run_folder: Path, app: str, pipeline: Pipeline) -> None:
        """`app`: `snapshot`, `replicate` or `publish-NAME`. Raises ConfigError for an unsafe folder."""
        host = "host-" + re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        # By what stays when the file changes, so that what a killed task left is found: pipelines of one name
        # have different lakes.
        digest = hashlib.sha256(f"{app}\0{pipeline.name}\0{pipeline.lake_root}".encode()).hexdigest()[:12]
        self.app = app
        home = private_folder(private_folder(run_folder.expanduser().absolute()) / host)
        self.folder = private_folder(home / f"{app}-{pipeline.name}-{digest}")

    def find(self, token: object) -> LocalApp | None:
        """The application of this place with that token, whoever gave it; None when there is none."""
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            return None
        folder = self.folder / token
        if is_private_folder(folder):
            return LocalApp(folder)
        return next((app for app in self._elsewhere() if app.token == token), None)

    def running(self) -> LocalApp | None:
        """The one that runs, if there is one."""
        return next((app for app in self.apps() if app.status() is AppState.RUNNING), None)

    def elsewhere(self) -> LocalApp | None:
        """Return the application that runs on this host for the same pipeline and lake from another run
        folder, as after `[pgrepl] run_folder`, AIRFLOW_HOME or the host's name was changed."""
        return next(self._elsewhere(), None)

    def _elsewhere(self) -> Iterator[LocalApp]:
        for folder in supervised_folders():
            is_ours = _TOKEN.fullmatch(folder.name) and folder.parent.name == self.folder.name
            if not is_ours or folder.parent == self.folder or not is_private_folder(folder):
                continue
            app = LocalApp(folder)
            if app.status() is AppState.RUNNING:
                yield app

    def apps(self) -> list[LocalApp]:
        """All that have left something here."""
        names = sorted(path.name for path in self.folder.iterdir())
        return [app for app in map(self.find, names) if app is not None]

    @contextmanager
    def claim(self) -> Iterator[Claim]:
        """Take the place for a new application; those that left something here have ended then.

        Raises PlaceTakenError while one is there. If nothing was launched inside the block, nothing stays.
        """
        lock = LockedFile.take(self.folder / _LOCK)
        if lock is None:
            raise PlaceTakenError
        try:
            folder = private_folder(self.folder / f"pgrepl-{secrets.token_hex(16)}")
            try:
                yield Claim(folder, lock)
            finally:
                if LocalApp(folder).pid is None:
                    remove_private_folder(folder)
        finally:
            lock.release()
