"""Adopt the app that runs for a task's pipeline on this host, or launch a new one."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.app.process import DSN_VARIABLE, STATE_DSN_VARIABLE
from airflow_provider_pgrepl.replication.runtime.file_locks import LockedFile
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.stores import ENDPOINTS

from .process import (
    AppState,
    LocalApp,
    is_private_folder,
    private_folder,
    remove_private_folder,
    supervised_folders,
)
from .supervisor import UNFOLLOWED_S, write_whole

_TOKEN = re.compile(r"pgrepl-[0-9a-f]{32}")
_LOCK = "lock"
_FILE = "order.json"
_OF_PLACE = {
    "order",
    *(f"variable {name}" for name in (DSN_VARIABLE, STATE_DSN_VARIABLE, *ENDPOINTS)),
}
_POLL_S = 0.2
_BEGIN_WAIT_S = 30.0
_CHARGE_WAIT_S = 15.0
_KILL_WAIT_S = 30.0
_SAY_EVERY_S = 60.0
Say = Callable[[int, str], None]
Pause = Callable[[float], None]
"""Waits for the given number of seconds. Raises the exception that ends the waiting task."""


class AppRunningError(Exception):
    """An app of this directory is running or is being started."""


@dataclass(frozen=True)
class AppReservation:
    """The lock of an app directory, and the folder of the app to launch in it."""

    folder: Path
    _lock: LockedFile

    def launch(
        self,
        command: Sequence[str],
        application: str,
        env: Mapping[str, str],
        stop_timeout_s: float,
        unfollowed_s: float = UNFOLLOWED_S,
    ) -> LocalApp:
        """Start the app. Its supervisor inherits the lock and holds it if this process ends.

        `stop_timeout_s`: seconds after a stop request until the app is killed. `unfollowed_s`: seconds for
        which it continues without a follower.
        """
        timeouts = stop_timeout_s, unfollowed_s
        return LocalApp.launch(command, application, env, self.folder, self._lock, *timeouts)


class RunDirectory:
    """A private directory with a folder for each started app, of which at most one runs."""

    def __init__(self, run_folder: Path, app: str, pipeline: Pipeline) -> None:
        """Create the directory below `run_folder` if it is missing.

        :param app: `snapshot`, `replicate` or `publish-NAME`
        :raises ConfigError: if a folder on the way cannot be created or is unsafe
        """
        host = "host-" + re.sub(r"[^A-Za-z0-9.-]", "_", socket.gethostname())
        # Use only values that do not change with the pipeline file, so that a later task finds the folder of
        # a killed task. Pipelines with the same name have different lakes.
        digest = hashlib.sha256(f"{app}\0{pipeline.name}\0{pipeline.lake_root}".encode()).hexdigest()[:12]
        self.app = app
        home = private_folder(private_folder(run_folder.expanduser().absolute()) / host)
        self.folder = private_folder(home / f"{app}-{pipeline.name}-{digest}")

    def find(self, token: object) -> LocalApp | None:
        """Return the app with this token, or None if the token is invalid or unknown.

        Searches this directory, then the running apps of this pipeline in other run folders.
        """
        if not isinstance(token, str) or not _TOKEN.fullmatch(token):
            return None
        folder = self.folder / token
        if is_private_folder(folder):
            return LocalApp(folder)
        return next((app for app in self._elsewhere() if app.token == token), None)

    def running(self) -> LocalApp | None:
        """Return the running app of this directory, or None."""
        return next((app for app in self.apps() if app.status() is AppState.RUNNING), None)

    def elsewhere(self) -> LocalApp | None:
        """Return the app of the same pipeline and lake that runs from another run folder, or None.

        There is one after a change of `[pgrepl] run_folder`, AIRFLOW_HOME or the host name.
        """
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
        """Return all apps that have a folder in this directory."""
        names = sorted(path.name for path in self.folder.iterdir())
        return [app for app in map(self.find, names) if app is not None]

    @contextmanager
    def claim(self) -> Iterator[AppReservation]:
        """Lock the directory and create a folder in it for a new app.

        The lock guarantees that no earlier app of this directory is running. If the block launches
        nothing, the folder is deleted. Raises AppRunningError if another process holds the lock.
        """
        lock = LockedFile.take(self.folder / _LOCK)
        if lock is None:
            raise AppRunningError
        try:
            folder = private_folder(self.folder / f"pgrepl-{secrets.token_hex(16)}")
            try:
                yield AppReservation(folder, lock)
            finally:
                if LocalApp(folder).pid is None:
                    remove_private_folder(folder)
        finally:
            lock.release()


@dataclass(frozen=True)
class LaunchSpec:
    """The parameters of an app: pipeline, arguments, Spark settings and environment variables.

    The values of environment variables are stored only as salted hashes.
    """

    pipeline: Pipeline
    application: str
    arguments: Sequence[str] = ()
    settings: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    def write(self, folder: Path) -> None:
        """Write the parameters to the folder of their app."""
        salt = secrets.token_hex(16)
        write_whole(folder / _FILE, json.dumps({"salt": salt, **self._comparable(salt)}))

    def differences(self, folder: Path) -> list[str]:
        """Return the names of the parameters that differ from those of the app in `folder`.

        Returns `["order"]` if the parameters of that app cannot be read.
        """
        try:
            known = json.loads((folder / _FILE).read_text(encoding="utf-8"))
            return _differences(known, self._comparable(str(known["salt"])))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return ["order"]

    def differences_of_place(self, folder: Path) -> list[str]:
        """Return the differing parameters that may name another source, state database or store.

        These decide whether two pipelines are the same: two servers can have the same names and paths.
        """
        return [name for name in self.differences(folder) if name in _OF_PLACE]

    def _comparable(self, salt: str) -> dict[str, Any]:
        return {
            "version": __version__,
            "application": self.application,
            "arguments": list(self.arguments),
            "settings": list(self.settings),
            "pipeline": json.loads(self.pipeline.to_json()),
            "variable": {name: _digest(salt, value) for name, value in self.environment.items()},
        }


def _differences(known: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in wanted.items():
        if not isinstance(value, dict):
            found += [name] if known[name] != value else []
            continue
        keys = sorted({*value, *known[name]})
        found += [f"{name} {key}" for key in keys if known[name].get(key) != value.get(key)]
    return found


def _digest(salt: str, value: str) -> str:
    return hashlib.sha256(f"{salt}{value}".encode()).hexdigest()


Launch = Callable[[AppReservation], LocalApp]


@dataclass(frozen=True)
class AttachedApp:
    """An app, and its follower lock, which this process holds."""

    app: LocalApp
    charge: LockedFile
    is_new: bool


@dataclass(frozen=True)
class AppAttachment:
    """The adoption of a running app by a task, or the launch of a new one.

    :param may_replace: if True, a running app that has other parameters and no follower is stopped
        and replaced. If False, the task waits until that app has ended, even if another task follows
        it.
    :param is_fresh: do not adopt an app. One without a follower is stopped, even if it has the same
        parameters.
    :param who: the name of this task, shown to other tasks
    :param await_turn: called before a launch. Waits, or raises BusyError, while an app on another
        host holds the pipeline's lock.
    """

    place: RunDirectory
    order: LaunchSpec
    may_replace: bool
    is_fresh: bool
    stop_timeout_s: float
    who: str
    launch: Launch
    say: Say
    await_turn: Callable[[Pause], None] = lambda _: None

    def take(self, pause: Pause = time.sleep) -> AttachedApp:
        """Adopt the running app, or launch one.

        :raises BusyError: if another task follows an app that may be replaced; if an app that
            was asked to end does not end; if an app of this name and lake, possibly of another
            pipeline, runs from another run folder; or if the folder of a running app is gone
        :raises Exception: any exception of `pause`
        """
        deadline = None
        while True:
            app = self.place.running() or self._elsewhere()
            if app is not None:
                deadline = None
                found = self._take_running(app, pause)
            else:
                self.await_turn(pause)
                found = self._launch()
                deadline = deadline or time.monotonic() + _BEGIN_WAIT_S
            if found is not None:
                return found
            if deadline is not None and time.monotonic() >= deadline:
                raise BusyError(
                    f"an app of pipeline {self.order.pipeline.name} runs on this host, and its folder"
                    f" below {self.place.folder} is gone",
                    "end its process (supervisor.py, with that folder among its arguments)",
                )
            pause(_POLL_S)

    def _elsewhere(self) -> LocalApp | None:
        """Return the app that runs for this pipeline from another run folder, or None.

        Raises BusyError if that app may use another source, state database or store.
        """
        app = self.place.elsewhere()
        if app is None or not (others := self.order.differences_of_place(app.folder)):
            return app
        if app.status() is not AppState.RUNNING:
            return None
        raise BusyError(
            f"an app of a pipeline {self.order.pipeline.name} with the lake"
            f" {self.order.pipeline.lake_root} runs on this host from another run folder, {app.folder}, with"
            f" other values of {', '.join(others)}: it may be another's. Nothing was changed",
            f"if it is this pipeline's, end it: kill {app.pid}. If not, give one of the two pipelines another"
            " name",
        )

    def take_known(self, app: LocalApp) -> AttachedApp:
        """Take the follower lock of `app`. Raises BusyError if another task still holds it after 15 s."""
        charge = app.lock_follower(self.who, _CHARGE_WAIT_S)
        if charge is None:
            raise self._followed(app)
        return AttachedApp(app, charge, is_new=False)

    def _launch(self) -> AttachedApp | None:
        """Launch a new app. Returns None if another process holds the lock of the directory."""
        try:
            with self.place.claim() as claim:
                self._remove_ended(claim.folder)
                self.order.write(claim.folder)
                return replace(self.take_known(self.launch(claim)), is_new=True)
        except AppRunningError:
            return None

    def _take_running(self, app: LocalApp, pause: Pause) -> AttachedApp | None:
        """Return the running app if this task can follow it, or None once it has ended."""
        try:
            return self._take(app, pause)
        except FileNotFoundError:
            return None  # the app has ended, and its task has deleted the folder

    def _take(self, app: LocalApp, pause: Pause) -> AttachedApp | None:
        if app.is_stopping:
            self._see_it_end(app)
            return None
        different = self.order.differences(app.folder)
        if different and not (self.may_replace or self.is_fresh):
            self._await(app, pause, lambda: None)
            return None
        charge = app.lock_follower(self.who, _CHARGE_WAIT_S)
        if charge is None and not self.may_replace:
            charge = self._await(app, pause, lambda: app.lock_follower(self.who))
            if charge is None:
                return None
        if charge is None:
            raise self._followed(app)
        return self._adopt_or_replace(app, charge, different)

    def _adopt_or_replace(
        self, app: LocalApp, charge: LockedFile, different: list[str]
    ) -> AttachedApp | None:
        """Adopt the app, or stop it for a new one and return None once it has ended.

        :param different: the parameters that differ from those of this task
        """
        if app.is_stopping:
            # The previous follower has asked the app to end.
            charge.release()
            self._see_it_end(app)
            return None
        if not different and not self.is_fresh:
            where = "" if self._is_of_place(app) else f" in {app.folder}"
            self.say(logging.INFO, f"Adopting the app that runs{where} as process {app.pid}")
            return AttachedApp(app, charge, is_new=False)
        others = f", started with other values of {', '.join(different)}," if different else ""
        self.say(logging.WARNING, f"The app that runs{others} is stopped for a new one")
        app.stop()
        self._see_it_end(app)
        charge.release()
        if not self._is_of_place(app):
            app.remove()  # the next task cleans up its own directory only
        return None

    def _is_of_place(self, app: LocalApp) -> bool:
        return app.folder.parent == self.place.folder

    def _see_it_end(self, app: LocalApp) -> None:
        """Wait for the end of an app that was asked to end.

        Raises BusyError if it still runs after `stop_timeout_s` + 30 seconds.
        """
        self.say(logging.INFO, "Waiting for the app that is ending")
        if app.wait(self.stop_timeout_s + _KILL_WAIT_S) is AppState.RUNNING:
            raise BusyError(
                f"the app of pipeline {self.order.pipeline.name} that was asked to end still runs on"
                f" this host as process {app.pid}",
                f"look what holds it up; kill -KILL {app.pid} ends it, which loses nothing",
            )

    def _await(self, app: LocalApp, pause: Pause, take: Callable[[], LockedFile | None]) -> LockedFile | None:
        """Wait until the app has ended, or until `take` returns its follower lock.

        Returns the lock, or None if the app has ended. Logs once a minute which app this is.
        """
        next_say = time.monotonic()
        while app.status() is AppState.RUNNING:
            if (charge := take()) is not None:
                return charge
            if time.monotonic() >= next_say:
                next_say = time.monotonic() + _SAY_EVERY_S
                self.say(logging.INFO, f"Waiting for the end of {self._described(app)}")
            pause(_POLL_S)
        return None

    def _described(self, app: LocalApp) -> str:
        text = f"{self.place.app} of pipeline {self.order.pipeline.name}, process {app.pid} on this host"
        follower = app.follower()
        return f"{text}, last followed by {follower}" if follower else text

    def _followed(self, app: LocalApp) -> BusyError:
        return BusyError(
            f"the app of pipeline {self.order.pipeline.name} on this host is followed by"
            f" {app.follower() or 'another task'} already",
            "end that task first: one task at a time replicates a pipeline, and one copies its tables",
        )

    def _remove_ended(self, own: Path) -> None:
        """Delete the folders of earlier apps. Log a warning for each that failed without a follower.

        :param own: the folder of the new app, which is kept
        """
        for app in self.place.apps():
            if app.folder == own:
                continue
            if app.status() is AppState.FAILED:
                self.say(
                    logging.WARNING,
                    f"An earlier app ended with exit code {app.exit_code()} while no task followed"
                    f" it: {app.last_words()}",
                )
            app.remove()
