"""Find the application that a task is to follow: one that runs for its pipeline here, or a new one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.hosting.local_app import AppState, LocalApp
from airflow_provider_pgrepl.hosting.locked_file import LockedFile
from airflow_provider_pgrepl.hosting.order import Order
from airflow_provider_pgrepl.hosting.place import Claim, Place, PlaceTakenError

_POLL_S = 0.2
_BEGIN_WAIT_S = 30.0
_CHARGE_WAIT_S = 15.0
_KILL_WAIT_S = 30.0

Launch = Callable[[Claim], LocalApp]
Say = Callable[[int, str], None]


@dataclass(frozen=True)
class InCharge:
    """An application, and the lock that makes this process the one that follows it."""

    app: LocalApp
    charge: LockedFile
    is_new: bool


@dataclass(frozen=True)
class Adoption:
    """A task's way to its application.

    `may_replace`: an application that runs for other parameters, and that nobody follows, is stopped for a
    new one; else it is left to end. `is_fresh`: likewise one that runs for the same. `who` is told to others
    who want it.
    """

    place: Place
    order: Order
    may_replace: bool
    is_fresh: bool
    stop_timeout_s: float
    who: str
    launch: Launch
    say: Say

    def take(self) -> InCharge:
        """Adopt what runs, or launch. Raises BusyError while another task follows it, or it does
        something else that is not to be broken off."""
        deadline = time.monotonic() + _BEGIN_WAIT_S
        while True:
            found = self._launch() or self._take_running()
            if found is not None:
                return found
            if time.monotonic() >= deadline:
                raise BusyError(
                    f"an application of pipeline {self.order.pipeline.name} runs on this host, and its folder"
                    f" below {self.place.folder} is gone",
                    "end its process (supervise.py, with that folder among its arguments)",
                )
            time.sleep(_POLL_S)

    def take_known(self, app: LocalApp) -> InCharge:
        """Become the one that follows this application. Raises BusyError while another task does."""
        return self._in_charge(app, is_new=False)

    def _launch(self) -> InCharge | None:
        """A new application; None while there is one."""
        try:
            with self.place.claim() as claim:
                self._bury(claim.folder)
                self.order.write(claim.folder)
                return self._in_charge(self.launch(claim), is_new=True)
        except PlaceTakenError:
            return None

    def _take_running(self) -> InCharge | None:
        """The application that has the place; None when there is none, or none any more."""
        app = self.place.running()
        if app is None:
            return None
        try:
            return self._take(app)
        except FileNotFoundError:
            return None  # it has ended meanwhile, and its task has cleaned up

    def _take(self, app: LocalApp) -> InCharge | None:
        if app.is_stopping:
            self.say(logging.INFO, "Waiting for the application that is ending")
            app.wait(self.stop_timeout_s + _KILL_WAIT_S)
            return None
        different = self.order.differences(app.folder)
        if different and not (self.may_replace or self.is_fresh):
            raise BusyError(
                f"another application of pipeline {self.order.pipeline.name} runs on this host, started with"
                f" other values of {', '.join(different)}",
                "it is left to end; this task can be tried again then",
            )
        found = self._in_charge(app, is_new=False)
        if found.app.is_stopping:
            # Who followed it until now has asked it to end.
            found.charge.release()
            return self._take(app)
        if not different and not self.is_fresh:
            self.say(logging.INFO, f"Adopting the application that runs as process {app.pid}")
            return found
        others = f", started with other values of {', '.join(different)}," if different else ""
        self.say(logging.WARNING, f"The application that runs{others} is stopped for a new one")
        app.stop()
        app.wait(self.stop_timeout_s + _KILL_WAIT_S)
        found.charge.release()
        return None

    def _in_charge(self, app: LocalApp, *, is_new: bool) -> InCharge:
        charge = app.take_charge(self.who, _CHARGE_WAIT_S)
        if charge is None:
            raise BusyError(
                f"the application of pipeline {self.order.pipeline.name} on this host is followed by"
                f" {app.follower() or 'another task'} already",
                "end that task first: one task at a time replicates a pipeline, and one copies its tables",
            )
        return InCharge(app, charge, is_new)

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
