"""The trigger that runs the checks of the drift sensor in the triggerer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_pgrepl.errors import PgReplError, Retry
from airflow_provider_pgrepl.hooks.replication import access_to
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.triggers.events import failed_event

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport


class DriftTrigger(BaseTrigger):
    """Check for drift once, or until drift is found. Connections are looked up in the triggerer.

    :param pipeline: the pipeline as JSON text, which holds no secrets
    :param mark_errored: mark tables errored that cannot continue
    :param until_drift: repeat the check until it finds something. Errors that a retry can fix are then
        ignored.
    :param poke_interval_s: seconds between two checks
    :param deadline: seconds since 1970 after which no further check starts

    The event has a `status`. `checked` comes with a `report`, and `failed` with `error`, `message` and
    `hint`. `timeout` means that no drift was found until the deadline. It comes with the error of the last
    check if that failed. If every check failed until the deadline, the status is `failed`. A restarted
    triggerer starts the checks again, which is safe.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        mark_errored: bool,
        until_drift: bool,
        poke_interval_s: float,
        deadline: float,
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.mark_errored = mark_errored
        self.until_drift = until_drift
        self.poke_interval_s = poke_interval_s
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {
            "pipeline": self.pipeline,
            "mark_errored": self.mark_errored,
            "until_drift": self.until_drift,
            "poke_interval_s": self.poke_interval_s,
            "deadline": self.deadline,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self._was_checked, self._failure = False, dict[str, Any]()
        while True:
            # Check in a thread: otherwise the check would block every other trigger.
            event = await asyncio.to_thread(self._check)
            left = self.deadline - time.time()
            if event is None and left <= 0:
                event = {**self._failure, "status": "timeout" if self._was_checked else "failed"}
            if event is not None:
                yield TriggerEvent(event)
                return
            await asyncio.sleep(min(self.poke_interval_s, left))

    def _check(self) -> dict[str, Any] | None:
        """Check once. Return the event that ends this trigger, or None to continue."""
        # Import this in the checking thread: it imports pyarrow, which would block the triggerer.
        from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift

        try:
            report = check_drift(access_to(Pipeline.from_json(self.pipeline)), self.mark_errored)
        except AirflowNotFoundException as error:
            return failed_event(error)
        except PgReplError as error:
            self._failure = failed_event(error)
            if self.until_drift and error.retry is Retry.TIMED:
                self.log.warning("The check could not be made, and will be again: %s", error)
                return None
            return self._failure
        self._was_checked, self._failure = True, {}
        self.log.info("%s", report.to_text())
        return self._event(report)

    def _event(self, report: DriftReport) -> dict[str, Any] | None:
        if self.until_drift and not report.found_anything:
            return None
        return {"status": "checked", "report": report.to_dict()}
