"""The sensor for DDL at the source before the next row arrives, and for the DDL of a migration."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, ClassVar

from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, Retry
from airflow_provider_pgrepl.hooks.pipeline import (
    PipelineArgument,
    check_at_parse_time,
    read_flag,
    read_pipeline,
)
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook, access_to
from airflow_provider_pgrepl.operators.failures import raise_failed, translated
from airflow_provider_pgrepl.replication.app.drift_check.report import DriftReport
from airflow_provider_pgrepl.replication.runtime.process_io import read_text
from airflow_provider_pgrepl.triggers import DriftTrigger

_FAIL_ON = ("unsafe", "any", "never")
_GRACE = timedelta(minutes=5)


class PgSchemaDriftSensor(BaseSensorOperator):
    """Compare a pipeline's tables with the source's catalog, and mark tables errored that cannot continue.

    The sensor checks once and returns the report, so that the schedule of its DAG sets the interval of
    checks. With `until_drift` it waits for drift, and the tasks after it react.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param fail_on: `unsafe`: fail if a table cannot continue; `any`: also fail if a table changed safely, or
        if a new table matches a pattern; `never` (templated)
    :param mark_errored: mark tables errored that cannot continue (templated)
    :param until_drift: check every `poke_interval` until there is something to report
    :param sql: check this migration instead. It is applied to the database of `database_conn_id` and rolled
        back (templated)
    :param migration_file: the path of a file with the migration, instead of `sql` (templated)
    :param database_conn_id: the connection of the database for the migration: a copy of the source's schema
        (templated)
    :param migration_timeout_s: seconds after which the migration is canceled
    :param deferrable: run the checks in the triggerer. A migration is always checked on the worker.

    A failure because of drift is not retried. The report is in XCom even if the task fails. With `soft_fail`
    the task is skipped instead of failed.
    """

    template_fields: Sequence[str] = (
        "pipeline",
        "fail_on",
        "mark_errored",
        "sql",
        "migration_file",
        "database_conn_id",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json", "sql": "sql"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        fail_on: str = "unsafe",
        mark_errored: bool | str = True,
        until_drift: bool = False,
        sql: str | None = None,
        migration_file: str | None = None,
        database_conn_id: str | None = None,
        migration_timeout_s: float = 300.0,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.fail_on = fail_on
        self.mark_errored = mark_errored
        self.until_drift = until_drift
        self.sql = sql
        self.migration_file = migration_file
        self.database_conn_id = database_conn_id
        self.migration_timeout_s = migration_timeout_s
        self.deferrable = deferrable

    def execute(self, context: Any) -> Any:
        if not self.deferrable or self._tries_a_migration:
            return super().execute(context)
        with translated():
            self._check_arguments()
            pipeline, mark_errored = read_pipeline(self.pipeline), self._marks_errored
        trigger = DriftTrigger(
            pipeline=pipeline.to_json(),
            mark_errored=mark_errored,
            until_drift=self.until_drift,
            poke_interval_s=self.poke_interval,
            deadline=time.time() + self.timeout,
        )
        # The trigger ends at its deadline. Airflow's timeout is for a trigger that cannot do so.
        timeout = timedelta(seconds=self.timeout) + _GRACE
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timeout)
        return None

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the report of the trigger's event, or raise its error.

        Raises AirflowSensorTimeout if no drift was found until the deadline.
        """
        if event["status"] == "timeout":
            last = f"; the last check could not be made: {event['message']}" if "message" in event else ""
            raise AirflowSensorTimeout(f"nothing was found to have drifted within {self.timeout} s{last}")
        raise_failed(event)
        return self._conclude(DriftReport.from_dict(event["report"]), context).xcom_value

    def poke(self, context: Any) -> PokeReturnValue:
        with translated():
            self._check_arguments()
            report = self._check()
        if report is None or (self._waits and not report.found_anything):
            return PokeReturnValue(is_done=False)
        return self._conclude(report, context)

    def _check(self) -> DriftReport | None:
        """Return the report, or None if the check failed temporarily and the sensor waits for drift."""
        # Import these here: they import pyarrow, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
        from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration

        pipeline = read_pipeline(self.pipeline)
        if self._tries_a_migration:
            dsn = PgReplicationHook(self.database_conn_id or "").dsn()
            return check_migration(dsn, pipeline, self._migration(), self.migration_timeout_s)
        try:
            return check_drift(access_to(pipeline), self._marks_errored)
        except PgReplError as error:
            if not self._waits or error.retry is not Retry.TIMED:
                raise
            self.log.warning("The check could not be made, and will be again: %s", error)
            return None

    def _migration(self) -> str:
        if self.sql is not None:
            return self.sql
        return read_text("migration", self.migration_file or "")

    def _conclude(self, report: DriftReport, context: Any) -> PokeReturnValue:
        self.log.info("%s", report.to_text())
        found = report.to_dict()
        if self._is_failure(report):
            context["ti"].xcom_push(key="return_value", value=found)
            raise AirflowFailException(report.to_text())
        return PokeReturnValue(is_done=True, xcom_value=found)

    def _is_failure(self, report: DriftReport) -> bool:
        if self.fail_on == "never":
            return False
        return report.found_anything if self.fail_on == "any" else report.is_unsafe

    def _check_arguments(self) -> None:
        if self.fail_on not in _FAIL_ON:
            raise ConfigError(f"fail_on: {self.fail_on!r} must be one of {', '.join(_FAIL_ON)}")
        if self.sql is not None and self.migration_file is not None:
            raise ConfigError("sql and migration_file: both are set", "set only one of them")
        if self._tries_a_migration and not self.database_conn_id:
            raise ConfigError(
                "database_conn_id: is needed to try a migration",
                "the connection of a copy of the source's schema, never the source itself",
            )

    @property
    def _tries_a_migration(self) -> bool:
        return self.sql is not None or self.migration_file is not None

    @property
    def _waits(self) -> bool:
        return self.until_drift and not self._tries_a_migration

    @property
    def _marks_errored(self) -> bool:
        return read_flag("mark_errored", self.mark_errored)
