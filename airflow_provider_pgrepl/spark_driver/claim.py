"""Find the application that a task is to follow: one that runs for its pipeline here, or a new one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.spark_driver.locked_file import LockedFile
from airflow_provider_pgrepl.spark_driver.order import Order
from airflow_provider_pgrepl.spark_driver.place import Claim, Place, PlaceTakenError
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp

_POLL_S = 0.2
_BEGIN_WAIT_S = 30.0
_CHARGE_WAIT_S = 15.0
_KILL_WAIT_S = 30.0
_SAY_EVERY_S = 60.0

Launch = Callable[[Claim], LocalApp]
Say = Callable[[int, str], None]
Pause = Callable[[float], None]
"""Waits so many seconds; raises what ends the task that waits."""


@dataclass(frozen=True)
class InCharge:
    """An application, and the lock that makes this process the one that follows it."""

    app: LocalApp
    charge: LockedFile
    is_new: bool


@dataclass(frozen=True)
class Adoption:
    """A task's way to its application.

    `may_replace`: an application that runs with other parameters, and that no task follows, is stopped for a
    new one. An application that may not be replaced is waited for, whoever follows it. `is_fresh`: no
    application is adopted; one that no task follows is stopped, also if it has the same parameters. `who`
    names this task to others. `await_turn`: called before a launch; waits, or raises BusyError, while an
    application on another host holds the pipeline's lock.
    """

    place: Place
    order: Order
    may_replace: bool
    is_fresh: bool
    stop_timeout_s: float
    who: str
    launch: Launch
    say: Say
    await_turn: Callable[[Pause], None] = lambda _: None

    def take(self, pause: Pause = time.sleep) -> InCharge:
        """Adopt the application that runs, or launch one.

        Raises BusyError while another task follows an application that may be replaced, or one that may be
        another's runs elsewhere on this host, and what `pause` raises.
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
                    f"an application of pipeline {self.order.pipeline.name} runs on this host, and its folder"
                    f" below {self.place.folder} is gone",
                    "end its process (supervise.py, with that folder among its arguments)",
                )
            pause(_POLL_S)

    def _elsewhere(self) -> LocalApp | None:
        """The application that runs for this pipeline from another run folder."""
        app = self.place.elsewhere()
        if app is None or not (others := self.order.differences_of_place(app.folder)):
            return app
        if app.status() is not AppState.RUNNING:
            return None
        raise BusyError(
            f"an application of a pipeline {self.order.pipeline.name} with the lake"
            f" {self.order.pipeline.lake_root} runs on this host from another run folder, {app.folder}, with"
            f" other values of {', '.join(others)}: it may be another's. Nothing was changed",
            f"if it is this pipeline's, end it: kill {app.pid}. If not, give one of the two pipelines another"
            " name",
        )

    def take_known(self, app: LocalApp) -> InCharge:
        """Become the one that follows this application. Raises BusyError while another task does."""
        charge = app.take_charge(self.who, _CHARGE_WAIT_S)
        if charge is None:
            raise self._followed(app)
        return InCharge(app, charge, is_new=False)

    def _launch(self) -> InCharge | None:
        """Launch a new application. Returns None while another process holds the place."""
        try:
            with self.place.claim() as claim:
                self._bury(claim.folder)
                self.order.write(claim.folder)
                return replace(self.take_known(self.launch(claim)), is_new=True)
        except PlaceTakenError:
            return None

    def _take_running(self, app: LocalApp, pause: Pause) -> InCharge | None:
        """Return the application in charge of this task, or None if it has ended."""
        try:
            return self._take(app, pause)
        except FileNotFoundError:
            return None  # it has ended meanwhile, and its task has cleaned up

    def _take(self, app: LocalApp, pause: Pause) -> InCharge | None:
        if app.is_stopping:
            self._see_it_end(app)
            return None
        different = self.order.differences(app.folder)
        if different and not (self.may_replace or self.is_fresh):
            self._await(app, pause, lambda: None)
            return None
        charge = app.take_charge(self.who, _CHARGE_WAIT_S)
        if charge is None and not self.may_replace:
            charge = self._await(app, pause, lambda: app.take_charge(self.who))
            if charge is None:
                return None
        if charge is None:
            raise self._followed(app)
        return self._adopt_or_replace(app, charge, different)

    def _adopt_or_replace(self, app: LocalApp, charge: LockedFile, different: list[str]) -> InCharge | None:
        """Return the application, or None once it has ended for a new one. `different`: its parameters that
        differ from this task's."""
        if app.is_stopping:
            # Who followed it until now has asked it to end.
            charge.release()
            self._see_it_end(app)
            return None
        if not different and not self.is_fresh:
            where = "" if self._is_of_place(app) else f" in {app.folder}"
            self.say(logging.INFO, f"Adopting the application that runs{where} as process {app.pid}")
            return InCharge(app, charge, is_new=False)
        others = f", started with other values of {', '.join(different)}," if different else ""
        self.say(logging.WARNING, f"The application that runs{others} is stopped for a new one")
        app.stop()
        self._see_it_end(app)
        charge.release()
        if not self._is_of_place(app):
            app.remove()  # the next task looks for remains in its own place alone
        return None

    def _is_of_place(self, app: LocalApp) -> bool:
        return app.folder.parent == self.place.folder

    def _see_it_end(self, app: LocalApp) -> None:
        """Wait for an application that was asked to end. Raises BusyError if it does not."""
        self.say(logging.INFO, "Waiting for the application that is ending")
        if app.wait(self.stop_timeout_s + _KILL_WAIT_S) is AppState.RUNNING:
            raise BusyError(
                f"the application of pipeline {self.order.pipeline.name} that was asked to end still runs on"
                f" this host as process {app.pid}",
                f"look what holds it up; kill -KILL {app.pid} ends it, which loses nothing",
            )

    def _await(self, app: LocalApp, pause: Pause, take: Callable[[], LockedFile | None]) -> LockedFile | None:
        """Wait until the application has ended, or until `take` returns its follower's lock. Once a minute
        the log says which application it is."""
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
            f"the application of pipeline {self.order.pipeline.name} on this host is followed by"
            f" {app.follower() or 'another task'} already",
            "end that task first: one task at a time replicates a pipeline, and one copies its tables",
        )

    def _bury(self, own: Path) -> None:
        """Delete what earlier applications left, and say how they ended that nobody followed to their end."""
        for app in self.place.apps():
            if app.folder == own:
                continue
            if app.status() is AppState.FAILED:
                self.say(
                    logging.WARNING,
                    f"An earlier application ended with exit code {app.exit_code()} while no task followed"
                    f" it: {app.last_words()}",
                )
            app.remove()
