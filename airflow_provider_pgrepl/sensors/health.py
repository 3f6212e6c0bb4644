"""The sensor that fails while a pipeline has a problem, so that every alerting of Airflow's works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseSensorOperator, PokeReturnValue, conf
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, check_at_parse_time, read_pipeline
from airflow_provider_pgrepl.hooks.replication import access_with_lake
from airflow_provider_pgrepl.operators.failures import raise_failed, translated
from airflow_provider_pgrepl.triggers import HealthTrigger

if TYPE_CHECKING:
    from airflow_provider_pgrepl.replication.app.status.health import HealthLimits, HealthReport

_FAIL_ON = ("failure", "warning", "never")


class PgReplicationHealthSensor(BaseSensorOperator):
    """Check the health of a pipeline once, and fail with one sentence for each problem.

    The sensor reads source, state database and lake; no app needs to run. The schedule of its DAG
    sets the interval of checks.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param fail_on: `failure`: fail if there is a failure; `warning`: also fail if there is only a warning;
        `never` (templated)
    :param lag_s: fail if a change that committed this number of seconds ago is not in the lake
    :param wal_warning: warn if the slot retains this share of its limit of WAL. The limit is the smaller one
        of the server's `max_slot_wal_keep_size` and the pipeline's `wal_budget`
    :param wal_failure: fail if the slot retains this share of its limit of WAL
    :param stalled_s: fail if a table is copied, catches up, or waits for a merge for so many seconds
    :param heartbeat_s: fail if the replication app has not reported for so many seconds
    :param is_continuous: an app should run all the time. Set it to False if replication runs by a
        schedule (`mode="caught_up"`): a slot that no process reads is no problem then
    :param deferrable: read the status in the triggerer. If the pipeline has a `lake_conn_id`, the status is
        always read on the worker.

    A failure because of a problem is not retried. The report is in XCom, also if the task fails: its
    `problems` have `severity`, `kind`, `object`, `reason` and `hint`. With `soft_fail` the task is skipped
    instead of failed.
    """

    template_fields: Sequence[str] = ("pipeline", "fail_on")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        fail_on: str = "failure",
        lag_s: float = 300.0,
        wal_warning: float = 0.5,
        wal_failure: float = 0.8,
        stalled_s: float = 3600.0,
        heartbeat_s: float = 60.0,
        is_continuous: bool = True,
        deferrable: bool = conf.getboolean("operators", "default_deferrable", fallback=False),
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.fail_on = fail_on
        self.lag_s = lag_s
        self.wal_warning = wal_warning
        self.wal_failure = wal_failure
        self.stalled_s = stalled_s
        self.heartbeat_s = heartbeat_s
        self.is_continuous = is_continuous
        self.deferrable = deferrable

    def execute(self, context: Any) -> Any:
        with translated():
            pipeline, limits = read_pipeline(self.pipeline), self._limits()
        if not self.deferrable or pipeline.lake_conn_id is not None:
            return super().execute(context)
        trigger = HealthTrigger(pipeline=pipeline.to_json(), limits=asdict(limits))
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=self.timeout))
        return None

    def execute_complete(self, context: Any, event: dict[str, Any]) -> Any:
        """Return the report of the trigger's event, or raise its error."""
        from airflow_provider_pgrepl.replication.app.status.health import HealthReport

        raise_failed(event)
        return self._conclude(HealthReport.from_dict(event["report"]), context).xcom_value

    def poke(self, context: Any) -> PokeReturnValue:
        # Import these here: they import pyarrow, which parsing a DAG does not need.
        from airflow_provider_pgrepl.replication.app.health_check import check_health

        with translated():
            pipeline = read_pipeline(self.pipeline)
            report = check_health(access_with_lake(pipeline), self._limits())
        return self._conclude(report, context)

    def _limits(self) -> HealthLimits:
        from airflow_provider_pgrepl.replication.app.status.health import HealthLimits

        if self.fail_on not in _FAIL_ON:
            raise ConfigError(f"fail_on: {self.fail_on!r} must be one of {', '.join(_FAIL_ON)}")
        return HealthLimits(
            self.lag_s,
            self.wal_warning,
            self.wal_failure,
            self.stalled_s,
            self.heartbeat_s,
            self.is_continuous,
        )

    def _conclude(self, report: HealthReport, context: Any) -> PokeReturnValue:
        self.log.info("%s", report.to_text())
        found = report.to_dict()
        if self._is_failure(report):
            context["ti"].xcom_push(key="return_value", value=found)
            raise AirflowFailException(report.to_text())
        return PokeReturnValue(is_done=True, xcom_value=found)

    def _is_failure(self, report: HealthReport) -> bool:
        if self.fail_on == "never":
            return False
        return bool(report.problems) if self.fail_on == "warning" else report.has_failed
