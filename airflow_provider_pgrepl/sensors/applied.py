"""The sensor that waits until lake tables are complete as of a time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, ClassVar

from airflow.sdk import BaseSensorOperator, conf
from airflow.sdk.exceptions import AirflowSensorTimeout

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    parse_tables,
    read_pipeline,
    read_tables,
)
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.operators.failures import raise_failed, translated
from airflow_provider_pgrepl.replication.app.applied import look_as_of
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.triggers import AppliedTrigger

_GRACE = timedelta(minutes=1)


class PgAppliedSensor(BaseSensorOperator):
    """Wait until lake tables have all transactions that committed at the source before a time.

    The sensor reads the state database only; no app needs to run. A table that is errored, paused or
    being copied is waited for.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param tables: names of tables, as `public.orders` (templated)
    :param as_of: a time with time zone, as a datetime or in ISO 8601 (templated), for example
        `{{ data_interval_end.isoformat() }}`
    :param settle_s: seconds after its commit time within which a transaction's commit record is written. The
        server takes the commit time just before it writes the record; only a stalled server takes seconds in
        between. The sensor does not succeed before this time has passed since `as_of`.
    :param deferrable: wait in the triggerer
    """

    template_fields: Sequence[str] = ("pipeline", "tables", "as_of")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        tables: Sequence[str] | str,
        as_of: datetime | str,
        settle_s: float = 60.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.tables = tables
        self.as_of = as_of
        self.settle_s = settle_s
        self.deferrable = deferrable

    def execute(self, context: Any) -> Any:
        if not self.deferrable:
            return super().execute(context)
        with translated():
            pipeline, tables, as_of = self._arguments()
        trigger = AppliedTrigger(
            pipeline=pipeline.name,
            state_conn_id=_state_conn_id(pipeline),
            tables=tables,
            as_of=as_of.isoformat(),
            settle_s=self.settle_s,
            poke_interval_s=self.poke_interval,
            deadline=time.time() + self.timeout,
        )
        # The trigger ends at its deadline. Airflow's timeout is for a trigger that cannot do so.
        timeout = timedelta(seconds=self.timeout) + _GRACE
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)
        return None

    def execute_complete(self, context: Any, event: dict[str, Any]) -> None:  # noqa: ARG002 - Airflow's
        """Return if the trigger's event says that the tables are complete, otherwise raise its error."""
        if event["status"] == "timeout":
            raise AirflowSensorTimeout(f"not within {self.timeout:g} s: {event['reason']}")
        raise_failed(event)

    def poke(self, context: Any) -> bool:  # noqa: ARG002 - Airflow's
        with translated():
            pipeline, tables, as_of = self._arguments()
            dsn = PgReplicationHook(_state_conn_id(pipeline)).dsn()
            reason = look_as_of(dsn, pipeline.name, parse_tables(tables), as_of, self.settle_s)
        if reason is not None:
            self.log.info("%s", reason)
        return reason is None

    def _arguments(self) -> tuple[Pipeline, list[str], datetime]:
        """Return pipeline, table names and time as they were given or rendered. Raises ConfigError."""
        pipeline, tables = read_pipeline(self.pipeline), read_tables(self.tables)
        if not pipeline.has_lake_tables:
            raise ConfigError(
                f"pipeline {pipeline.name} has no lake tables, for which this sensor waits",
                "name a pipeline with lake tables, or remove the task",
            )
        if not tables:
            raise ConfigError("tables: is empty", "name the tables to wait for, as public.orders")
        parse_tables(tables)
        if self.settle_s < 0:
            raise ConfigError(f"settle_s: {self.settle_s:g} is negative", "give 0 or more seconds")
        try:
            as_of = datetime.fromisoformat(str(self.as_of))
        except ValueError:
            raise ConfigError(
                f"as_of: {str(self.as_of)!r} is not a time in ISO 8601",
                "write {{ data_interval_end.isoformat() }}, or 2026-01-31T09:00:00+01:00",
            ) from None
        return pipeline, tables, as_of


def _state_conn_id(pipeline: Pipeline) -> str:
    return pipeline.state_conn_id or pipeline.conn_id
