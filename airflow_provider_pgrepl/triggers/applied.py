"""The trigger that waits in the triggerer until lake tables are complete as of a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from datetime import datetime
from typing import Any

from airflow.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.app.applied import look_as_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.triggers.events import failed_event


class AppliedTrigger(BaseTrigger):
    """Wait until tables have all transactions that committed before a time. Reads the state database.

    :param pipeline: the name of the pipeline
    :param state_conn_id: the connection of the state database
    :param tables: names of tables, as `public.orders`
    :param as_of: the time in ISO 8601, with time zone
    :param settle_s: see PgAppliedSensor
    :param poke_interval_s: seconds between two checks
    :param deadline: seconds since 1970 after which no further check starts

    The event has a `status`: `applied`, `timeout` with the `reason` of the last check, or `failed` with
    `error`, `message` and `hint`.
    """

    def __init__(
        self,
        *,
        pipeline: str,
        state_conn_id: str,
        tables: Sequence[str],
        as_of: str,
        settle_s: float,
        poke_interval_s: float,
        deadline: float,
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.state_conn_id = state_conn_id
        self.tables = list(tables)
        self.as_of = as_of
        self.settle_s = settle_s
        self.poke_interval_s = poke_interval_s
        self.deadline = deadline

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {
            "pipeline": self.pipeline,
            "state_conn_id": self.state_conn_id,
            "tables": self.tables,
            "as_of": self.as_of,
            "settle_s": self.settle_s,
            "poke_interval_s": self.poke_interval_s,
            "deadline": self.deadline,
        }

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            # Check in a thread: otherwise the check would block every other trigger.
            event = await asyncio.to_thread(self._check)
            left = self.deadline - time.time()
            if event["status"] != "missing":
                yield TriggerEvent(event)
                return
            self.log.info("%s", event["reason"])
            if left <= 0:
                yield TriggerEvent({"status": "timeout", "reason": event["reason"]})
                return
            await asyncio.sleep(min(self.poke_interval_s, left))

    def _check(self) -> dict[str, Any]:
        try:
            dsn, as_of = PgReplicationHook(self.state_conn_id).dsn(), datetime.fromisoformat(self.as_of)
            tables = [TableName.parse(table) for table in self.tables]
            reason = look_as_of(dsn, self.pipeline, tables, as_of, self.settle_s)
        except (AirflowNotFoundException, PgReplError) as error:
            return failed_event(error)
        return {"status": "applied"} if reason is None else {"status": "missing", "reason": reason}
