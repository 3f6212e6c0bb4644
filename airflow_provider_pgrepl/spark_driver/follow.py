"""Follow an app from a task: forward its log, its result and a stop request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.replication.runtime.process_io import LogLine

from .claim import AppAttachment, AttachedApp
from .process import AppState, LocalApp, LogTail

RESULT_FILE = "result.json"

_LATE_S = 5.0
"""The age in seconds from which a line of the log is shown with its own time."""
_KILL_WAIT_S = 30.0


class StoppedError(Exception):
    """The task was asked to stop while it waited for an app to end."""


class OrphanedTaskError(Exception):
    """The parent of this process has died, so this process no longer acts for the task."""


@dataclass(frozen=True)
class AppEnd:
    """The end of an app, or its hand-over to the next task run while it continues.

    :param why: the last error in its log, or its last lines if there is no error; empty after a
        hand-over, and if the app is lost
    :param result: the last content of its result file
    """

    status: AppState
    exit_code: int | None
    why: str
    result: dict[str, Any] | None
    handed_over: bool = False


class ApplicationFollower:
    """Follows the app of a pipeline on this host for one try of a task.

    :param poll_interval_s: seconds between two readings of its state, log and result
    :param hand_over_after_s: seconds until the app is handed over; None follows it to its end
    :param after_end: called once the app has ended, before its folder is deleted
    :param on_result: called with each new content of its result file, while it runs and at its end
    """

    def __init__(
        self,
        adoption: AppAttachment,
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
        self._found: AttachedApp | None = None
        self.was_asked_to_stop = False

    def begin(self) -> str:
        """Adopt or launch the app, and return the handle by which a later try finds it.

        Raises BusyError. Raises StoppedError or OrphanedTaskError while it waits for another app.
        """
        self._found = self._adoption.take(self._pause)
        self._forward_stop()
        return self._found.app.token

    def status(self, handle: object) -> AppState:
        """Return the state of the app that `handle` identifies.

        Returns LOST if this host has no such app, if the running app was asked to stop, or if an app that
        runs or is done was started with other parameters. Then `begin` finds a running one and decides, and
        the work of a finished one is not this task's.
        """
        app = self._adoption.place.find(handle)
        if app is None:
            return AppState.LOST
        status = app.status()
        if status is AppState.RUNNING and app.is_stopping:
            return AppState.LOST
        ran_well = status in (AppState.RUNNING, AppState.DONE)
        is_other = ran_well and self._adoption.order.differences(app.folder)
        return AppState.LOST if is_other else status

    def follow(self, handle: object) -> AppEnd:
        """Forward the log and results of the app until it has ended or is handed over.

        Raises OrphanedTaskError. Raises BusyError if another task follows the app.
        """
        if self._found is None:
            app = self._adoption.place.find(handle)
            if app is None:
                return AppEnd(AppState.LOST, None, "", None)
            self._found = self._adoption.take_known(app)
            self._forward_stop()
        end = self._follow(self._found.app)
        self._found.charge.release()
        self._found = None
        return end

    def is_known(self, handle: object) -> bool:
        """Return True if this host still has the app that `handle` identifies."""
        return self._adoption.place.find(handle) is not None

    def stop(self) -> None:
        """Ask the app to end, and return at once.

        If this task does not follow an app yet, the request is forwarded as soon as it does.
        """
        self.was_asked_to_stop = True
        self._forward_stop()

    def _pause(self, seconds: float) -> None:
        if self.was_asked_to_stop:
            raise StoppedError
        if self._is_orphaned:
            raise OrphanedTaskError
        time.sleep(seconds)

    def _forward_stop(self) -> None:
        if self.was_asked_to_stop and self._found is not None:
            self._found.app.stop()

    def stop_and_wait(self) -> None:
        """Stop the app that this try follows, wait for its end and delete its folder.

        Waits at most `stop_timeout_s` + 30 seconds. Does nothing if this try follows no app, or if
        the parent of this process has died.
        """
        found, self._found = self._found, None
        if found is None or self._is_orphaned:
            return
        found.app.stop()
        found.app.wait(self._adoption.stop_timeout_s + _KILL_WAIT_S)
        self._after_end()
        found.charge.release()
        found.app.remove()

    def _follow(self, app: LocalApp) -> AppEnd:
        log = app.log()
        hand_over_at = time.monotonic() + (self._hand_over_after_s or float("inf"))
        while True:
            status = app.status()  # read the state before the log, so that no last line is missed
            for line in log.new_lines(ended=status is not AppState.RUNNING):
                self._adoption.say(line.level, _text_of(line))
            self._forward_result(app)
            if status is not AppState.RUNNING:
                return self._end(app, status, log)
            if self._is_orphaned:
                raise OrphanedTaskError
            if time.monotonic() >= hand_over_at and not app.is_stopping:
                return AppEnd(status, None, "", self._result, handed_over=True)
            time.sleep(self._poll_interval_s)

    def _end(self, app: LocalApp, status: AppState, log: LogTail) -> AppEnd:
        end = AppEnd(status, app.exit_code(), log.why(), self._result)
        self._after_end()
        app.remove()
        return end

    def _forward_result(self, app: LocalApp) -> None:
        found = _result(app)
        if found is not None and found != self._result:
            self._result = found
            self._on_result(found)

    @property
    def _is_orphaned(self) -> bool:
        return os.getppid() != self._parent


def _text_of(line: LogLine) -> str:
    """Return the text of a log line. A line that is 5 s old or older starts with its own time.

    The task log adds the current time to each line.
    """
    if line.at is None or (datetime.now(UTC) - line.at).total_seconds() < _LATE_S:
        return line.text
    return f"[{line.at:%Y-%m-%d %H:%M:%S} UTC] {line.text}"


def _result(app: LocalApp) -> dict[str, Any] | None:
    try:
        found = json.loads((app.folder / RESULT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
