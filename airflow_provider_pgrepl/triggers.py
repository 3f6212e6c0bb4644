"""The triggers: what the triggerer does for sensors that are deferred, and for assets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Hashable, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from airflow.exceptions import AirflowNotFoundException
from airflow.triggers.base import BaseEventTrigger, BaseTrigger, TriggerEvent

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, Retry
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook, access_to
from airflow_provider_pgrepl.replication.app.applied import TablePoints, look_as_of, read_applied
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.applied import Applied

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport

_ANNOUNCED = "announced_lsn"


def _failed_event(error: PgReplError | AirflowNotFoundException) -> dict[str, Any]:
    """Return the event of a trigger that failed. Its sensor raises it: `operators.failures.raise_failed`."""
    if not isinstance(error, PgReplError):
        # Airflow reports a missing connection of a task, but of a trigger only that it failed.
        error = ConfigError(str(error), "define the connection")
    return {
        "status": "failed",
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
    }


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
            return _failed_event(error)
        return {"status": "checked", "report": report.to_dict()}


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
            return _failed_event(error)
        return {"status": "applied"} if reason is None else {"status": "missing", "reason": reason}


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
            return _failed_event(error)
        except PgReplError as error:
            self._failure = _failed_event(error)
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
