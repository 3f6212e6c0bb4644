"""SparkAppOperator: what the snapshot and the replication operator share, running one Spark application.

Where the driver runs decides how. With a deploy mode of `cluster`, all is SparkSubmitOperator's: submission,
tracking, re-attachment. Otherwise the driver runs on this worker, detached from the task (`hosting/`): it
outlives a task that crashes, the next try or run adopts it, and a stop is graceful.
"""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowException

from airflow_provider_pgrepl.hooks.access import access_to, access_with_lake
from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, check_at_parse_time, read_pipeline
from airflow_provider_pgrepl.links.task import DocumentationLink, LakeLink, StatusLink
from airflow_provider_pgrepl.operators.driver_settings import (
    connection_strings,
    driver_environment,
    properties_with_lineage,
)
from airflow_provider_pgrepl.operators.failures import FORSAKEN, raise_unless_well, translated
from airflow_provider_pgrepl.operators.spark_connection import (
    LOCAL_CONN_ID,
    ensure_connection,
    has_driver_on_cluster,
)
from airflow_provider_pgrepl.operators.submit_parameters import (
    refuse_connection_id,
    refuse_of_no_use_on_worker,
)
from airflow_provider_pgrepl.operators.worker import STATUS, push, run_folder, show_links, task_of
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.selection import wait_until_unlocked
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.state.locks import STARTED_BY_VARIABLE
from airflow_provider_pgrepl.spark_driver.claim import Adoption, Pause
from airflow_provider_pgrepl.spark_driver.follow import End, Following, ForsakenError, StoppedError
from airflow_provider_pgrepl.spark_driver.order import Order
from airflow_provider_pgrepl.spark_driver.place import Claim, Place
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp

_PIPELINE_FILE = "pipeline.json"
_JUST_ENDED_S = 15.0
"""The lock of an application that has just ended may be held until the server has noticed it."""


class SparkAppOperator(SparkSubmitOperator):
    """Run one of this package's Spark applications for a pipeline; without Spark, if that has no lake tables.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param spark_conn_id: Airflow connection of Spark; None runs on `master`, on this worker
    :param master: Spark master without a `spark_conn_id`
    :param application: another application than the one this operator is for (templated)
    :param preflight: whether to ask source and state, before Spark is started on this worker, for what the
        application would refuse to begin with
    :param stop_timeout_s: how long a stopped application may take to finish before it is killed
    :param poll_interval_s: how often its state and its log are looked at

    Everything else is SparkSubmitOperator's. `application_args` come after the operator's own.
    """

    app: ClassVar[str]
    may_replace: ClassVar[bool] = False
    """Whether one that runs for other parameters, and that no task follows, is stopped for a new one. An
    application that may not be replaced, as a copy of tables, is waited for, wherever it runs."""
    hand_over_after_s: float | None = None
    application: str
    application_args: list[Any] | None
    conf: dict[Any, Any] | None
    files: str | None
    _spark_binary: str | None
    template_fields: Sequence[str] = (*SparkSubmitOperator.template_fields, "pipeline")
    template_fields_renderers: ClassVar[dict[str, str]] = {"pipeline": "json"}
    operator_extra_links = (StatusLink(), LakeLink(), DocumentationLink())
    ui_color = "#d9e8f5"

    def __init__(
        self,
        *,
        pipeline: PipelineArgument,
        spark_conn_id: str | None = None,
        master: str = "local[*]",
        application: str = "",
        name: str = "pgrepl",
        preflight: bool = True,
        stop_timeout_s: float = 120.0,
        poll_interval_s: float = 1.0,
        **kwargs: Any,
    ) -> None:
        refuse_connection_id(kwargs)
        super().__init__(application=application, conn_id=spark_conn_id or LOCAL_CONN_ID, name=name, **kwargs)
        check_at_parse_time(pipeline)
        self.pipeline = pipeline
        self.spark_conn_id = spark_conn_id
        self.master = master
        self.preflight = preflight
        self.stop_timeout_s = stop_timeout_s
        self.poll_interval_s = poll_interval_s
        self._following: Following | None = None
        self._ended: End | None = None

    @property
    def place_name(self) -> str:
        """Under which name the one application of its kind lives on a host."""
        return self.app

    @property
    def lock_purpose(self) -> str:
        """For what the application takes the lock of its pipeline."""
        return self.app

    def secrets(self) -> dict[str, str]:
        """Variables for the application's process alone. Raises ConfigError."""
        return connection_strings(self._resolved)

    def app_arguments(self) -> list[str]:
        """Arguments after `--pipeline FILE` on the application's command line. Raises ConfigError."""
        raise NotImplementedError

    def check_start(self, access: Access) -> None:
        """Raise what the application would refuse to begin with, as far as that is known without Spark."""
        raise NotImplementedError

    def ended_well(self) -> None:
        """Called when the application ended with exit code 0 and nobody stopped it."""

    def execute(self, context: Any) -> Any:
        with translated():
            self._resolved = read_pipeline(self.pipeline)
            show_links(context, self, self.operator_extra_links)
            self._own_args = self.app_arguments()
            self._given_args = [str(argument) for argument in self.application_args or []]
            self.application = self.application or spark_submit.application(self.app)
            if not self._resolved.has_lake_tables:
                self._hook = None
                return self._execute_detached(context)
            self._hook = self._spark_hook()
            if has_driver_on_cluster(self._hook._connection):
                return self._execute_on_cluster(context)
            return self._execute_detached(context)

    def _spark_hook(self) -> SparkSubmitHook:
        ensure_connection(self.spark_conn_id, self.master)
        if self._spark_binary is None or os.sep not in self._spark_binary:
            self._spark_binary = spark_submit.spark_submit(self._spark_binary or "spark-submit")
        return self._get_hook()

    # --- on a cluster: SparkSubmitOperator's way ---

    def _execute_on_cluster(self, context: Any) -> None:
        """The pipeline travels as one of Spark's files; the DSN is the cluster's to provide.

        SparkSubmitHook would put variables for a cluster's driver on the command line, where `ps` shows them.
        """
        self._following = None
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

    def _execute_detached(self, context: Any) -> Any:
        if self._resolved.has_lake_tables:
            spark_submit.java()
            spark_submit.allow_open_files()
        refuse_of_no_use_on_worker(self)
        secrets = self.secrets()
        order = Order(
            self._resolved,
            self.application,
            [*self._own_args, *self._given_args],
            [] if self._hook is None else self._hook._build_spark_common_args(),
            {**secrets, **{name: str(value) for name, value in (self.env_vars or {}).items()}},
        )
        adoption = Adoption(
            place=Place(run_folder(), self.place_name, self._resolved),
            order=order,
            may_replace=self.may_replace,
            is_fresh=not self.durable,
            stop_timeout_s=self.stop_timeout_s,
            who=task_of(context),
            launch=lambda claim: self._launch(claim, secrets, context),
            say=self._say,
            await_turn=self._await_turn,
        )
        self._following = Following(
            adoption,
            self.poll_interval_s,
            self.hand_over_after_s,
            after_end=self._after_end,
            on_result=lambda found: push(context, STATUS, found),
        )
        try:
            return self.execute_resumable(context)
        except ForsakenError:
            raise AirflowException(FORSAKEN) from None
        except StoppedError:
            raise AirflowException("stopped on request, before an application was started") from None
        except BaseException:
            self._following.stop_and_wait()
            raise

    def _await_turn(self, pause: Pause) -> None:
        """Wait while an application of the same kind, as on another host, holds the pipeline's lock."""
        if self.preflight:
            limit_s = _JUST_ENDED_S if self.may_replace else float("inf")
            access = access_to(self._resolved)
            wait_until_unlocked(
                access, self.lock_purpose, limit_s, lambda text: self._say(logging.INFO, text), pause
            )

    def _launch(self, claim: Claim, secrets: dict[str, str], context: Any) -> LocalApp:
        if self.preflight:
            self.check_start(access_with_lake(self._resolved))
        pipeline_file = claim.folder / _PIPELINE_FILE
        pipeline_file.write_text(self._resolved.to_json(), encoding="utf-8")
        if not self._resolved.has_lake_tables:
            return self._launch_without_spark(claim, pipeline_file, secrets)
        assert self._hook is not None
        conf = dict(self.conf or {})
        if not self._hook._connection["master"].startswith("local"):
            conf |= spark_submit.driver_python(conf, (self.env_vars or {}).get("PYSPARK_DRIVER_PYTHON"))
        self.conf = properties_with_lineage(
            conf,
            context,
            parent=self._openlineage_inject_parent_job_info,
            transport=self._openlineage_inject_transport_info,
        )
        self.application_args = ["--pipeline", str(pipeline_file), *self._own_args, *self._given_args]
        hook = self._get_hook()
        command = hook._build_spark_submit_command(self.application)
        environment = driver_environment(hook, self.env_vars or {}, secrets, claim.folder)
        if self.application == spark_submit.application(self.app):
            environment |= spark_submit.small_jvm(environment) | spark_submit.readable_names(command)
        environment[STARTED_BY_VARIABLE] = task_of(context)
        app = claim.launch(command, self.application, environment, self.stop_timeout_s)
        self.log.info("Started %s as process %s", self.application, app.pid)
        return app

    def _launch_without_spark(self, claim: Claim, pipeline_file: Path, secrets: dict[str, str]) -> LocalApp:
        own = [*self._own_args, *self._given_args]
        command = spark_submit.without_spark(self.application, str(pipeline_file), own)
        environment = driver_environment(None, self.env_vars or {}, secrets, claim.folder)
        app = claim.launch(command, self.application, environment, self.stop_timeout_s)
        self.log.info("Started %s as process %s", self.application, app.pid)
        return app

    def _after_end(self) -> None:
        """What SparkSubmitOperator runs after its application."""
        if self._resolved.has_lake_tables:
            self._get_hook()._run_post_submit_commands()

    def _say(self, level: int, text: str) -> None:
        self.log.log(level, "%s", text)

    def _conclude(self, end: End) -> Any:
        """The task's result, by how its application ended; raises unless it ended well."""
        assert self._following is not None
        if end.handed_over:
            self.log.info("The application goes on; the next run of this task adopts it")
            return end.result
        raise_unless_well(end, self._following.was_asked_to_stop)
        self.ended_well()
        return end.result

    # --- ResumableJobMixin; `_following` is there when the driver runs on this worker ---

    def submit_job(self, context: Any) -> Any:
        if self._following is None:
            return super().submit_job(context)
        return self._following.begin()

    def get_job_status(self, external_id: Any, context: Any) -> str:
        if self._following is None:
            # What was submitted before the Spark connection was changed is not the cluster's.
            is_one = isinstance(external_id, str) and not external_id.startswith("pgrepl-")
            return str(super().get_job_status(external_id, context)) if is_one else AppState.LOST.value
        return self._following.status(external_id).value

    def is_job_active(self, status: str) -> bool:
        return bool(super().is_job_active(status)) if self._following is None else status == "running"

    def is_job_succeeded(self, status: str) -> bool:
        return bool(super().is_job_succeeded(status)) if self._following is None else status == "done"

    def poll_until_complete(self, external_id: Any, context: Any) -> Any:
        if self._following is None:
            return super().poll_until_complete(external_id, context)
        self._ended = self._following.follow(external_id)
        return self._conclude(self._ended)

    def get_job_result(self, external_id: Any, context: Any) -> Any:
        """Also called alone, when an application ended well while no task was watching."""
        if self._following is None:
            return super().get_job_result(external_id, context)
        if self._ended is None and self._following.is_known(external_id):
            return self.poll_until_complete(external_id, context)
        return self._ended.result if self._ended is not None else None

    def on_kill(self) -> None:
        if self._following is None:
            super().on_kill()
        else:
            self.log.info("Asking the application to end")
            self._following.stop()
