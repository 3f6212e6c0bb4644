"""SparkAppOperator: what the snapshot and the replication operator share, running one Spark application.

Where the driver runs decides how. With a deploy mode of `cluster`, all is SparkSubmitOperator's: submission,
tracking, re-attachment. Otherwise the driver runs on this worker, detached from the task (`local_app`): it
outlives a task that crashes, the next try re-attaches to it, and a stop is graceful.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException

from airflow_provider_pgrepl import applications
from airflow_provider_pgrepl.operators.driver_settings import (
    connection_strings,
    driver_environment,
    properties_with_lineage,
)
from airflow_provider_pgrepl.operators.failures import failure_of, translated
from airflow_provider_pgrepl.operators.local_app import LocalApp, LogTail, Status
from airflow_provider_pgrepl.operators.pipeline_argument import (
    PipelineArgument,
    check_at_parse_time,
    read_pipeline,
)
from airflow_provider_pgrepl.operators.spark_connection import LOCAL_CONN_ID, ensure_connection

_PIPELINE_FILE = "pipeline.json"


class SparkAppOperator(SparkSubmitOperator):
    """Run one of this package's Spark applications for a pipeline.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param spark_conn_id: Airflow connection of Spark; None runs on `master`, on this worker
    :param master: Spark master without a `spark_conn_id`
    :param application: another application than the one this operator is for (templated)
    :param stop_timeout_s: how long a stopped application may take to finish before it is killed
    :param poll_interval_s: how often its state and its log are looked at

    Everything else is SparkSubmitOperator's. `application_args` come after the operator's own.
    """

    app: ClassVar[str]
    application: str
    application_args: list[Any] | None
    conf: dict[Any, Any] | None
    files: str | None
    _spark_binary: str | None
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "pipeline")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        spark_conn_id: str | None = None,
        master: str = "local[*]",
        application: str = "",
        name: str = "pgrepl",
        stop_timeout_s: float = 120.0,
        poll_interval_s: float = 1.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(application=application, conn_id=spark_conn_id or LOCAL_CONN_ID, name=name, **kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.spark_conn_id = spark_conn_id
        self.master = master
        self.stop_timeout_s = stop_timeout_s
        self.poll_interval_s = poll_interval_s
        self._running: LocalApp | None = None
        self._killed = False
        self._detached = True
        self._parent = 0

    def app_arguments(self) -> list[str]:
        """What follows `--pipeline FILE` on the application's command line. Raises ConfigError."""
        raise NotImplementedError

    def ended_well(self) -> None:
        """Called when the application ended with exit code 0 and nobody stopped it."""

    def execute(self, context: Any) -> None:
        with translated():
            self._resolved = read_pipeline(self.pipeline)
            self._own_args = self.app_arguments()
            self._given_args = [str(argument) for argument in self.application_args or []]
            self.application = self.application or applications.application(self.app)
            self._hook = self._spark_hook()
            if self._hook._connection["deploy_mode"] == "cluster":
                self._execute_on_cluster(context)
            else:
                self._execute_detached(context)

    def _spark_hook(self) -> SparkSubmitHook:
        ensure_connection(self.spark_conn_id, self.master)
        if self._spark_binary is None or os.sep not in self._spark_binary:
            self._spark_binary = applications.spark_submit(self._spark_binary or "spark-submit")
        return self._get_hook()

    # --- on a cluster: SparkSubmitOperator's way ---

    def _execute_on_cluster(self, context: Any) -> None:
        """The pipeline travels as one of Spark's files; the DSN is the cluster's to provide.

        SparkSubmitHook would put variables for a cluster's driver on the command line, where `ps` shows them.
        """
        self._detached = False
        folder = Path(tempfile.mkdtemp(prefix="pgrepl-"))
        try:
            (folder / _PIPELINE_FILE).write_text(self._resolved.to_json(), encoding="utf-8")
            shipped = str(folder / _PIPELINE_FILE)
            self.files = f"{self.files},{shipped}" if self.files else shipped
            self.application_args = ["--pipeline", _PIPELINE_FILE, *self._own_args, *self._given_args]
            self._hook = None
            super().execute(context)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # --- on this worker, detached ---

    def _execute_detached(self, context: Any) -> None:
        self._detached = True
        self._parent = os.getppid()
        applications.java()
        try:
            self.execute_resumable(context)
        except BaseException:
            self._stop_after_failure()
            raise

    def _launch(self, context: Any) -> LocalApp:
        secrets = connection_strings(self._resolved)
        folder = Path(tempfile.mkdtemp(prefix=f"pgrepl-{self._resolved.name}-"))  # readable by us alone
        pipeline_file = folder / _PIPELINE_FILE
        pipeline_file.write_text(self._resolved.to_json(), encoding="utf-8")
        self.conf = properties_with_lineage(
            self.conf,
            context,
            parent=self._openlineage_inject_parent_job_info,
            transport=self._openlineage_inject_transport_info,
        )
        self.application_args = ["--pipeline", str(pipeline_file), *self._own_args, *self._given_args]
        hook = self._get_hook()
        command = hook._build_spark_submit_command(self.application)
        environment = driver_environment(hook, self.env_vars or {}, secrets)
        app = LocalApp.launch(command, self.application, environment, folder, self.stop_timeout_s)
        self.log.info("Started %s as process %s of %s", self.application, app.pid, app.host)
        return app

    def _follow(self, app: LocalApp) -> None:
        """Forward the log until the application has ended; raise unless it ended well."""
        self._running = app
        log = app.log()
        while True:
            status = app.status()  # before the log, so that its last lines are not missed
            for line in log.new_lines(ended=status is not Status.RUNNING):
                self.log.info("%s", line)
            if status is not Status.RUNNING:
                break
            time.sleep(self.poll_interval_s)
        self._running = None
        self._conclude(app, status, log)

    def _conclude(self, app: LocalApp, status: Status, log: LogTail) -> None:
        code = app.exit_code()
        app.remove()
        if self._killed:
            # Airflow goes by how `execute` ends: returning would count as success.
            raise AirflowException(f"stopped on request; the application ended with exit code {code}")
        if status is Status.LOST or code is None:
            raise AirflowException("the application vanished without an exit code: it or its host was killed")
        if code:
            raise failure_of(code, log.last_lines)
        self.ended_well()

    def _stop_after_failure(self) -> None:
        """Stop what runs, and see it end, when the task ends otherwise than by the application's end."""
        app = self._running
        # A task whose Airflow supervisor died is not the one in charge: another try has re-attached, or will.
        if app is None or os.getppid() != self._parent:
            return
        app.stop()
        deadline = time.monotonic() + self.stop_timeout_s + 30
        while app.status() is Status.RUNNING and time.monotonic() < deadline:
            time.sleep(self.poll_interval_s)
        app.remove()

    # --- ResumableJobMixin; a dict is one of our applications, a string one of SparkSubmitOperator's ---

    def submit_job(self, context: Any) -> Any:
        if not self._detached:
            return super().submit_job(context)
        self._running = self._launch(context)
        return self._running.to_json()

    def get_job_status(self, external_id: Any, context: Any) -> str:
        if isinstance(external_id, dict) != self._detached:
            return Status.LOST.value  # submitted before the Spark connection was changed
        if not self._detached:
            return str(super().get_job_status(external_id, context))
        return LocalApp.from_json(external_id).status().value

    def is_job_active(self, status: str) -> bool:
        return status == Status.RUNNING.value if self._detached else bool(super().is_job_active(status))

    def is_job_succeeded(self, status: str) -> bool:
        return status == Status.DONE.value if self._detached else bool(super().is_job_succeeded(status))

    def poll_until_complete(self, external_id: Any, context: Any) -> None:
        if not self._detached:
            super().poll_until_complete(external_id, context)
            return
        self._follow(LocalApp.from_json(external_id))

    def get_job_result(self, external_id: Any, context: Any) -> None:  # noqa: ARG002 - Airflow's signature
        """Also called alone, when an application ended well while no task was watching."""
        if self._detached and Path(external_id["folder"]).exists():
            self._follow(LocalApp.from_json(external_id))

    def on_kill(self) -> None:
        self._killed = True
        if not self._detached:
            super().on_kill()
        elif self._running is not None:
            self.log.info("Asking the application to end")
            self._running.stop()
