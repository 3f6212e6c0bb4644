"""Following: a task watches the application that it is in charge of, and passes on what that says."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.replication.runtime.process_io import LogLine
from airflow_provider_pgrepl.spark_driver.claim import Adoption, InCharge
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp, LogTail

RESULT_FILE = "result.json"

_LATE_S = 5.0
_KILL_WAIT_S = 30.0


class StoppedError(Exception):
    """The task was asked to stop while it waited for an application to end."""


class ForsakenError(Exception):
    """Whoever runs this process has died: it is not the one in charge any more."""


@dataclass(frozen=True)
class End:
    """How an application ended, or that it was handed over and goes on. `result`: what it left behind."""

    status: AppState
    exit_code: int | None
    why: str
    result: dict[str, Any] | None
    handed_over: bool = False


class Following:
    """One try's dealings with the application of its pipeline on this host.

    `after_end`: called once it has ended, before its folder is deleted. `on_result`: called with what it
    leaves for a reader, while it runs and at its end.
    """

    def __init__(
        self,
        adoption: Adoption,
        poll_interval_s: float,
        hand_over_after_s: float | None = None,
        after_end: Callable[[], None] = lambda: None,
        on_result: Callable[[dict[str, Any]], None] = lambda _: None,
    ) -> None:
        self._adoption = adoption
        self._poll_interval_s = poll_interval_s
        self._hand_over_after_s = hand_over_after_s
        self._after_end = after_end
        self._on_result = on_result
        self._result: dict[str, Any] | None = None
        self._parent = os.getppid()
        self._found: InCharge | None = None
        self.was_asked_to_stop = False

    def begin(self) -> str:
        """Adopt or launch; the handle by which a later try finds the application.

        Raises BusyError, and StoppedError or ForsakenError while it waits for another application.
        """
        self._found = self._adoption.take(self._pause)
        self._pass_on_stop()
        return self._found.app.token

    def status(self, handle: object) -> AppState:
        """Of the application that a handle stands for; LOST when it is none of this place.

        LOST, too, when it runs for another order: whoever begins anew finds it, and decides.
        """
        app = self._adoption.place.find(handle)
        if app is None:
            return AppState.LOST
        status = app.status()
        if status is AppState.RUNNING and (app.is_stopping or self._adoption.order.differences(app.folder)):
            return AppState.LOST
        return status

    def follow(self, handle: object) -> End:
        """Pass on what it says until it has ended, or is handed over. Raises ForsakenError, BusyError."""
        if self._found is None:
            app = self._adoption.place.find(handle)
            if app is None:
                return End(AppState.LOST, None, "", None)
            self._found = self._adoption.take_known(app)
            self._pass_on_stop()
        end = self._follow(self._found.app)
        self._found.charge.release()
        self._found = None
        return end

    def is_known(self, handle: object) -> bool:
        """Whether there is still something to conclude of it."""
        return self._adoption.place.find(handle) is not None

    def stop(self) -> None:
        """Ask it to end; returns at once. A task may be asked before it is in charge of an application."""
        self.was_asked_to_stop = True
        self._pass_on_stop()

    def _pause(self, seconds: float) -> None:
        if self.was_asked_to_stop:
            raise StoppedError
        if self._is_forsaken:
            raise ForsakenError
        time.sleep(seconds)

    def _pass_on_stop(self) -> None:
        if self.was_asked_to_stop and self._found is not None:
            self._found.app.stop()

    def stop_and_wait(self) -> None:
        """Stop what this try is in charge of, and see it end; nothing, when it is not in charge any more."""
        found, self._found = self._found, None
        if found is None or self._is_forsaken:
            return
        found.app.stop()
        found.app.wait(self._adoption.stop_timeout_s + _KILL_WAIT_S)
        self._after_end()
        found.charge.release()
        found.app.remove()

    def _follow(self, app: LocalApp) -> End:
        log = app.log()
        hand_over_at = time.monotonic() + (self._hand_over_after_s or float("inf"))
        while True:
            status = app.status()  # before the log, so that its last lines are not missed
            for line in log.new_lines(ended=status is not AppState.RUNNING):
                self._adoption.say(line.level, _shown(line))
            self._look_at_result(app)
            if status is not AppState.RUNNING:
                return self._concluded(app, status, log)
            if self._is_forsaken:
                raise ForsakenError
            if time.monotonic() >= hand_over_at and not app.is_stopping:
                return End(status, None, "", self._result, handed_over=True)
            time.sleep(self._poll_interval_s)

    def _concluded(self, app: LocalApp, status: AppState, log: LogTail) -> End:
        end = End(status, app.exit_code(), log.why(), self._result)
        self._after_end()
        app.remove()
        return end

    def _look_at_result(self, app: LocalApp) -> None:
        found = _result(app)
        if found is not None and found != self._result:
            self._result = found
            self._on_result(found)

    @property
    def _is_forsaken(self) -> bool:
        return os.getppid() != self._parent


def _shown(line: LogLine) -> str:
    """The text, with the time when it was said if that was long ago: the log has its own time of day."""
    if line.at is None or (datetime.now(UTC) - line.at).total_seconds() < _LATE_S:
        return line.text
    return f"[{line.at:%Y-%m-%d %H:%M:%S} UTC] {line.text}"


def _result(app: LocalApp) -> dict[str, Any] | None:
    try:
        found = json.loads((app.folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
