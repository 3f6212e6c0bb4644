"""The base of the operators that run one app of this package.

With deploy mode `cluster`, SparkSubmitOperator submits the app, tracks it and attaches to it again.
Otherwise the driver runs on this worker, detached from the task (`spark_driver/`). It outlives a task that
crashes, the next try or run adopts it, and a stop is graceful.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.providers.common.compat.openlineage.utils.spark import (
    inject_parent_job_information_into_spark_properties,
    inject_transport_information_into_spark_properties,
)
from airflow.sdk import BaseOperatorLink, Connection, conf
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.connections import lake_variables
from airflow_provider_pgrepl.hooks.pipeline import PipelineArgument, check_at_parse_time, read_pipeline
from airflow_provider_pgrepl.hooks.replication import (
    PgReplicationHook,
    access_to,
    access_with_lake,
    missing_connection,
)
from airflow_provider_pgrepl.links.task import DocumentationLink, LakeLink, StatusLink
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.metrics.otlp import EXPORT_VARIABLE
from airflow_provider_pgrepl.replication.app.operations.selection import wait_until_unlocked
from airflow_provider_pgrepl.replication.app.process import (
    DSN_VARIABLE,
    PRIMARY_DSN_VARIABLE,
    STATE_DSN_VARIABLE,
)
from airflow_provider_pgrepl.replication.runtime import spark_submit
from airflow_provider_pgrepl.replication.runtime.process_io import (
    FORMAT_VARIABLE,
    JSON,
    LEVEL_VARIABLE,
    RESULT_VARIABLE,
)
from airflow_provider_pgrepl.replication.runtime.spark_submit import quiet_logging, small_process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import replaced_by
from airflow_provider_pgrepl.replication.state.actor import STARTED_BY_VARIABLE
from airflow_provider_pgrepl.spark_driver.claim import (
    AppAttachment,
    AppReservation,
    LaunchSpec,
    Pause,
    RunDirectory,
)
from airflow_provider_pgrepl.spark_driver.follow import (
    RESULT_FILE,
    AppEnd,
    ApplicationFollower,
    OrphanedTaskError,
    StoppedError,
)
from airflow_provider_pgrepl.spark_driver.process import AppState, LocalApp
from airflow_provider_pgrepl.spark_driver.supervisor import UNFOLLOWED_S

from .failures import FORSAKEN, raise_unless_well, task_of, translated

LOCAL_CONN_ID = "pgrepl_local_spark"
_MIN_UNFOLLOWED_S = 60.0
"""Less time may not be enough for the next task to follow an app."""
_CLUSTER = "it is for deploy mode cluster, and the driver runs on this worker"
_OPTIONAL_DSNS = (STATE_DSN_VARIABLE, PRIMARY_DSN_VARIABLE)
_WITHOUT_EFFECT = {
    "java_class": "the apps are in Python",
    "status_poll_interval": f"{_CLUSTER}, where poll_interval_s counts",
    "track_driver_via_k8s_api": _CLUSTER,
    "yarn_track_via_rm_api": _CLUSTER,
    "yarn_rm_auth": _CLUSTER,
}
_DEFAULTS: Mapping[str, Any] = {"status_poll_interval": 1}
STATUS = "status"
"""The XCom key of an app's status, which is updated while the app runs."""
_PIPELINE_FILE = "pipeline.json"
_OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_JUST_ENDED_S = 15.0
"""Seconds to wait for the lock of an app that has just ended: the server may notice its end late."""


def ensure_connection(conn_id: str | None, master: str) -> None:
    """Check that the connection exists. For None, define LOCAL_CONN_ID as a connection to `master`.

    Raises AirflowNotFoundException for a missing connection, which SparkSubmitHook would ignore.
    """
    if conn_id is not None:
        try:
            SparkSubmitHook.get_connection(conn_id)
        except AirflowNotFoundException as error:
            other = "leave spark_conn_id out: then Spark runs on this worker (master)"
            raise missing_connection(error, conn_id, "spark", other) from None
        return
    os.environ[f"AIRFLOW_CONN_{LOCAL_CONN_ID.upper()}"] = Connection(
        conn_id=LOCAL_CONN_ID, conn_type="spark", host=master
    ).as_json()


def has_driver_on_cluster(connection: Mapping[str, Any]) -> bool:
    """Return True if the driver runs on the cluster, according to the connection that SparkSubmitHook read.

    Raises ConfigError for deploy mode cluster on a standalone cluster, where Spark runs no Python driver:
    https://spark.apache.org/docs/4.2.0/submitting-applications.html
    """
    if connection["deploy_mode"] != "cluster":
        return False
    if str(connection["master"]).startswith("spark://"):
        raise ConfigError(
            "deploy mode cluster: on a standalone cluster Spark runs no driver in Python",
            "set the Spark connection's deploy mode to client: the driver then runs on this worker, detached"
            " from the task, and its executors on the cluster",
        )
    return True


def refuse_connection_id(parameters: Mapping[str, Any]) -> None:
    """Raise ConfigError if `parameters` has `conn_id`: here, the Spark connection is `spark_conn_id`."""
    if "conn_id" in parameters:
        raise ConfigError(
            "conn_id: this operator takes the Spark connection as spark_conn_id",
            "rename the argument; the connection of the source is conn_id in the pipeline file",
        )


def refuse_options_without_effect(operator: Any) -> None:
    """Raise ConfigError for parameters that have no effect if the driver runs on this worker."""
    given = [
        f"{name}: {why}"
        for name, why in _WITHOUT_EFFECT.items()
        if getattr(operator, f"_{name}") not in (None, False, _DEFAULTS.get(name))
    ]
    if given:
        raise ConfigError("; ".join(given), "leave out these arguments")


def connection_strings(pipeline: Pipeline) -> dict[str, str]:
    """Return the pipeline's secrets as environment variables for the app's process only.

    Raises ConfigError.
    """
    secrets = {DSN_VARIABLE: PgReplicationHook(pipeline.conn_id).dsn()}
    if pipeline.state_conn_id is not None:
        secrets[STATE_DSN_VARIABLE] = PgReplicationHook(pipeline.state_conn_id).dsn()
    if pipeline.primary_conn_id is not None:
        secrets[PRIMARY_DSN_VARIABLE] = PgReplicationHook(pipeline.primary_conn_id).dsn()
    return secrets | lake_variables(pipeline)


def driver_environment(
    hook: SparkSubmitHook | None, env_vars: Mapping[str, Any], secrets: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """Return the worker's environment with the task's variables. The secrets override both.

    :param hook: None for an app without Spark
    :param folder: the folder in which the app writes its result
    """
    # A worker's own variables must not apply to a pipeline without these connections.
    inherited = {key: value for key, value in os.environ.items() if key not in _OPTIONAL_DSNS}
    # The worker's store variables, such as a token of other keys or another endpoint, must not apply either.
    replaced = set(replaced_by(secrets))
    inherited = {key: value for key, value in inherited.items() if key not in replaced}
    environment = {**quiet_logging(), **inherited}
    if hook is None:
        environment = small_process(environment)
    else:
        environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if hook is not None and hook._connection["master"].startswith("local"):
        environment["PYSPARK_PYTHON"] = sys.executable
    environment.setdefault(LEVEL_VARIABLE, conf.get("logging", "logging_level", fallback="INFO"))
    environment |= otel_variables(environment)
    environment |= {key: str(value) for key, value in env_vars.items()}
    ours = {FORMAT_VARIABLE: JSON, RESULT_VARIABLE: str(folder / RESULT_FILE), "PYTHONUNBUFFERED": "1"}
    return {**environment, **secrets, **ours}


def otel_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which the app exports metrics to OpenTelemetry if Airflow does.

    The app inherits OpenTelemetry's own variables from the worker. Airflow's deprecated settings are
    used only if none of them names an address, as Airflow does.
    """
    if not conf.getboolean("metrics", "otel_on", fallback=False):
        return {}
    found = {EXPORT_VARIABLE: "1"}
    is_named = any(environment.get(name) for name in _OTEL_ENDPOINTS)
    if not is_named and conf.has_option("metrics", "otel_host") and conf.has_option("metrics", "otel_port"):
        scheme = "https" if conf.getboolean("metrics", "otel_ssl_active", fallback=False) else "http"
        address = f"{conf.get('metrics', 'otel_host')}:{conf.get('metrics', 'otel_port')}"
        found[_OTEL_ENDPOINTS[0]] = f"{scheme}://{address}/v1/metrics"
    return found


def properties_with_lineage(
    conf: Mapping[Any, Any] | None, context: Any, *, parent: bool, transport: bool
) -> dict[Any, Any]:
    """Return Spark's properties with those of OpenLineage: for the parent job and for the transport."""
    properties = dict(conf or {})
    if parent:
        properties = inject_parent_job_information_into_spark_properties(properties, context)
    if transport:
        properties = inject_transport_information_into_spark_properties(properties, context)
    return properties


def run_folder() -> Path:
    """Return the folder of `[pgrepl] run_folder`, by default `pgrepl` below AIRFLOW_HOME."""
    named = str(conf.get("pgrepl", "run_folder", fallback="")).strip()
    home = os.environ.get("AIRFLOW_HOME") or "~/airflow"
    return Path(named or f"{home}/pgrepl").expanduser()


def unfollowed_timeout_s() -> float:
    """Return `[pgrepl] unfollowed_timeout_s`. Raises ConfigError if it is no number or too short."""
    given = str(conf.get("pgrepl", "unfollowed_timeout_s", fallback=UNFOLLOWED_S)).strip()
    with suppress(ValueError):
        if (found := float(given)) >= _MIN_UNFOLLOWED_S:
            return found
    raise ConfigError(
        f"[pgrepl] unfollowed_timeout_s in Airflow's configuration is {given}: it is a number of seconds,"
        f" {_MIN_UNFOLLOWED_S:g} or more",
        "set a longer time than the retry_delay of the task: until its next try, no task follows the app",
    )


def push(context: Any, key: str, value: Any) -> None:
    """Push a value to XCom now. It replaces the value of this key."""
    if (task := context.get("ti")) is not None:
        task.xcom_push(key=key, value=value)


def show_links(context: Any, operator: Any, links: Iterable[BaseOperatorLink]) -> None:
    """Push the links to XCom at the start of a task. Airflow does so at its end, after up to months."""
    if (task := context.get("ti")) is None:
        return
    for link in links:
        push(context, link.xcom_key, link.get_link(operator, ti_key=task))


class SparkAppOperator(SparkSubmitOperator):
    """Run one of this package's apps for a pipeline: in Spark if the pipeline has lake tables.

    :param pipeline: a Pipeline, a dict of its fields, JSON text, or the path of a JSON file (templated)
    :param spark_conn_id: Airflow connection of Spark; None: Spark runs on this worker, with `master`
    :param master: Spark master if there is no `spark_conn_id`
    :param application: path of another app to run instead of the operator's own (templated)
    :param name: the name of the Spark application (templated)
    :param preflight: check source and state before an app is started on this worker, and fail with
        the error that the app would raise
    :param stop_timeout_s: seconds after a stop request until the app is killed
    :param poll_interval_s: seconds between two readings of the app's state and log

    Other parameters: see SparkSubmitOperator. `application_args` are appended to the operator's own
    arguments.
    """

    app: ClassVar[str]
    may_replace: ClassVar[bool] = False
    """True if a running app that has other parameters and no follower is stopped and replaced.

    If False, as for a snapshot, the task waits for the end of that app, on whichever host it runs.
    """
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
        self._following: ApplicationFollower | None = None
        self._ended: AppEnd | None = None

    @property
    def place_name(self) -> str:
        """The name of the app directory on a host, in which at most one app runs."""
        return self.app

    @property
    def lock_purpose(self) -> str:
        """The purpose under which the app takes the lock of its pipeline."""
        return self.app

    def secrets(self) -> dict[str, str]:
        """Return secret environment variables for the app's process only. Raises ConfigError."""
        return connection_strings(self._resolved)

    def app_arguments(self) -> list[str]:
        """Return the app's arguments after `--pipeline FILE`. Raises ConfigError."""
        raise NotImplementedError

    def check_start(self, access: Access) -> None:
        """Raise the error that the app would raise at its start, if it can be found without Spark."""
        raise NotImplementedError

    def on_status(self, context: Any, status: dict[str, Any]) -> None:
        """Push a new status of the app to XCom."""
        push(context, STATUS, status)

    def ended_well(self) -> None:
        """Called if the app ended with exit code 0 and the task was not asked to stop."""

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

    # --- on a cluster, by SparkSubmitOperator ---

    def _execute_on_cluster(self, context: Any) -> None:
        """Run the app on a cluster. The pipeline is sent as one of Spark's files.

        The cluster must provide the DSN: SparkSubmitHook would put variables for the driver on the command
        line, where `ps` shows them.
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
        refuse_options_without_effect(self)
        self._unfollowed_s = unfollowed_timeout_s()
        secrets = self.secrets()
        order = LaunchSpec(
            self._resolved,
            self.application,
            [*self._own_args, *self._given_args],
            [] if self._hook is None else self._hook._build_spark_common_args(),
            {**secrets, **{name: str(value) for name, value in (self.env_vars or {}).items()}},
        )
        adoption = AppAttachment(
            place=RunDirectory(run_folder(), self.place_name, self._resolved),
            order=order,
            may_replace=self.may_replace,
            is_fresh=not self.durable,
            stop_timeout_s=self.stop_timeout_s,
            who=task_of(context),
            launch=lambda claim: self._launch(claim, secrets, context),
            say=self._say,
            await_turn=self._await_turn,
        )
        self._following = ApplicationFollower(
            adoption,
            self.poll_interval_s,
            self.hand_over_after_s,
            after_end=self._after_end,
            on_result=lambda found: self.on_status(context, found),
        )
        try:
            return self.execute_resumable(context)
        except OrphanedTaskError:
            raise AirflowException(FORSAKEN) from None
        except StoppedError:
            raise AirflowException("stopped on request, before an app was started") from None
        except BaseException:
            self._following.stop_and_wait()
            raise

    def _await_turn(self, pause: Pause) -> None:
        """Wait while another process, as on another host, holds the pipeline's lock for this purpose.

        Does nothing without `preflight`. An app that may be replaced is waited for 15 s, then
        BusyError is raised.
        """
        if self.preflight:
            limit_s = _JUST_ENDED_S if self.may_replace else float("inf")
            access = access_to(self._resolved)
            wait_until_unlocked(
                access, self.lock_purpose, limit_s, lambda text: self._say(logging.INFO, text), pause
            )

    def _launch(self, claim: AppReservation, secrets: dict[str, str], context: Any) -> LocalApp:
        if self.preflight:
            self.check_start(access_with_lake(self._resolved))
        pipeline_file = claim.folder / _PIPELINE_FILE
        pipeline_file.write_text(self._resolved.to_json(), encoding="utf-8")
        if not self._resolved.has_lake_tables:
            return self._launch_without_spark(claim, pipeline_file, secrets, context)
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
        return self._start(claim, command, environment, context)

    def _launch_without_spark(
        self, claim: AppReservation, pipeline_file: Path, secrets: dict[str, str], context: Any
    ) -> LocalApp:
        own = [*self._own_args, *self._given_args]
        command = spark_submit.without_spark(self.application, str(pipeline_file), own)
        environment = driver_environment(None, self.env_vars or {}, secrets, claim.folder)
        return self._start(claim, command, environment, context)

    def _start(
        self, claim: AppReservation, command: list[str], environment: dict[str, str], context: Any
    ) -> LocalApp:
        environment[STARTED_BY_VARIABLE] = task_of(context)
        timeouts = self.stop_timeout_s, self._unfollowed_s
        app = claim.launch(command, self.application, environment, *timeouts)
        self.log.info("Started %s as process %s", self.application, app.pid)
        return app

    def _after_end(self) -> None:
        """Run the commands that SparkSubmitOperator runs after its app."""
        if self._resolved.has_lake_tables:
            self._get_hook()._run_post_submit_commands()

    def _say(self, level: int, text: str) -> None:
        self.log.log(level, "%s", text)

    def _conclude(self, end: AppEnd) -> Any:
        """Return the task's result after the end or hand-over of its app.

        Raises an exception for a failure and for a requested stop.
        """
        assert self._following is not None
        if end.handed_over:
            self.log.info("The app continues; the next run of this task adopts it")
            return end.result
        raise_unless_well(end, self._following.was_asked_to_stop)
        self.ended_well()
        return end.result

    # --- ResumableJobMixin; `_following` is set if the driver runs on this worker ---

    def submit_job(self, context: Any) -> Any:
        if self._following is None:
            return super().submit_job(context)
        return self._following.begin()

    def get_job_status(self, external_id: Any, context: Any) -> str:
        if self._following is None:
            # An app that was launched before the Spark connection was changed is not on the cluster.
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
        """Return the result of the app.

        Airflow also calls this without `poll_until_complete`, if the app succeeded without a
        follower.
        """
        if self._following is None:
            return super().get_job_result(external_id, context)
        if self._ended is None and self._following.is_known(external_id):
            return self.poll_until_complete(external_id, context)
        return self._ended.result if self._ended is not None else None

    def on_kill(self) -> None:
        if self._following is None:
            super().on_kill()
        else:
            self.log.info("Asking the app to end")
            self._following.stop()
