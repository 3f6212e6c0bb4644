"""The trigger that reads a pipeline's health in the triggerer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.hooks.replication import access_to
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.triggers.events import failed_event


class HealthTrigger(BaseTrigger):
    """Read the health of a pipeline once. Connections are looked up in the triggerer.

    :param pipeline: the pipeline as JSON text, which holds no secrets
    :param limits: the fields of HealthLimits

    The event has a `status`: `checked` comes with a `report`, and `failed` with `error`, `message` and
    `hint`.
    """

    def __init__(self, *, pipeline: str, limits: Mapping[str, Any]) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.limits = dict(limits)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {"pipeline": self.pipeline, "limits": self.limits}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        # Read in a thread: otherwise the reads would block every other trigger.
        yield TriggerEvent(await asyncio.to_thread(self._read))

    def _read(self) -> dict[str, Any]:
        # Import these in the reading thread: they import pyarrow, which would block the triggerer.
        from airflow_provider_pgrepl.replication.app.health_check import check_health
        from airflow_provider_pgrepl.replication.app.status.health import HealthLimits

        try:
            pipeline = Pipeline.from_json(self.pipeline)
            report = check_health(access_to(pipeline), HealthLimits(**self.limits))
        except (PgReplError, AirflowNotFoundException) as error:
            return failed_event(error)
        return {"status": "checked", "report": report.to_dict()}
