"""The trigger that announces consistent points of a lake table as events of its asset."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable
from typing import Any

from airflow.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.app.applied import TablePoints, read_applied
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.applied import Applied

_ANNOUNCED = "announced_lsn"


class ConsistentPointTrigger(BaseEventTrigger):
    """Announce consistent points at which a table has changed. Reads the state database; no app needs
    to run.

    :param pipeline: the name of the pipeline
    :param table: the table, as `public.orders`
    :param state_conn_id: the connection of the state database
    :param every_s: the least seconds between two events
    :param poll_interval_s: seconds between two readings of the state. The tables of a pipeline share them.

    The payload of an event has `pipeline`, `table`, `lsn` and `commit_time`. The asset's state keeps the LSN
    announced last, so that a restarted triggerer continues after it. If the triggerer is killed between an
    event and that record, the event is repeated.
    """

    def __init__(
        self, *, pipeline: str, table: str, state_conn_id: str, every_s: float, poll_interval_s: float
    ) -> None:
        super().__init__()
        self.pipeline = pipeline
        self.table = table
        self.state_conn_id = state_conn_id
        self.every_s = every_s
        self.poll_interval_s = poll_interval_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{__name__}.{type(self).__name__}", {
            "pipeline": self.pipeline,
            "table": self.table,
            "state_conn_id": self.state_conn_id,
            "every_s": self.every_s,
            "poll_interval_s": self.poll_interval_s,
        }

    def shared_stream_key(self) -> Hashable | None:
        """Return what the triggers that read the same progress have in common."""
        return __name__, self.pipeline, self.state_conn_id, str(self.poll_interval_s)

    @classmethod
    async def open_shared_stream(cls, kwargs: dict[str, Any]) -> AsyncIterator[Applied]:
        """Yield the progress of the pipeline at each reading that succeeds."""
        conn_id, pipeline = kwargs["state_conn_id"], kwargs["pipeline"]
        while True:
            try:
                # Read in a thread: otherwise the reads would block every other trigger.
                yield await asyncio.to_thread(_read, conn_id, pipeline)
            except (PgReplError, AirflowNotFoundException) as error:
                cls.logger().warning("The progress of pipeline %s cannot be read: %s", pipeline, error)
            await asyncio.sleep(kwargs["poll_interval_s"])

    async def filter_shared_stream(self, shared_stream: AsyncIterator[Any]) -> AsyncIterator[TriggerEvent]:
        """Yield an event for each point of the table, at most one every `every_s`."""
        points = TablePoints(TableName.parse(self.table), await self._announced())
        next_at = 0.0
        async for applied in shared_stream:
            if time.monotonic() < next_at or (point := points.look(applied)) is None:
                continue
            next_at = time.monotonic() + self.every_s
            commit_time = None if point.commit_time is None else point.commit_time.isoformat()
            named = {"pipeline": self.pipeline, "table": self.table}
            yield TriggerEvent({**named, "lsn": str(point.lsn), "commit_time": commit_time})
            if self.asset_state_store is not None:
                await self.asset_state_store.aset(_ANNOUNCED, str(point.lsn))

    async def run(self) -> AsyncIterator[TriggerEvent]:
        async for event in self.filter_shared_stream(self.open_shared_stream(self.serialize()[1])):
            yield event

    async def _announced(self) -> LSN:
        if self.asset_state_store is None:
            return LSN(0)
        return LSN.parse(str(await self.asset_state_store.aget(_ANNOUNCED) or "0/0"))


def _read(conn_id: str, pipeline: str) -> Applied:
    return read_applied(PgReplicationHook(conn_id).dsn(), pipeline)
