"""Settings of a driver on this worker: secrets and Python in its environment, lineage in its properties."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.providers.common.compat.openlineage.utils.spark import (
    inject_parent_job_information_into_spark_properties,
    inject_transport_information_into_spark_properties,
)
from airflow.sdk import conf

from airflow_provider_pgrepl.hooks.lake import lake_variables
from airflow_provider_pgrepl.hooks.replication import PgReplicationHook
from airflow_provider_pgrepl.replication.runtime.process_io import FORMAT_VARIABLE, JSON, LEVEL_VARIABLE
from airflow_provider_pgrepl.replication.runtime.run_result import RESULT_VARIABLE
from airflow_provider_pgrepl.replication.runtime.spark_submit import quiet_logging, small_process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import replaced_by
from airflow_provider_pgrepl.spark_driver.follow import RESULT_FILE


def connection_strings(pipeline: Pipeline) -> dict[str, str]:
    """The pipeline's secrets, for the environment of the process alone."""
    secrets = {"PGREPL_DSN": PgReplicationHook(pipeline.conn_id).dsn()}
    if pipeline.state_conn_id is not None:
        secrets["PGREPL_STATE_DSN"] = PgReplicationHook(pipeline.state_conn_id).dsn()
    return secrets | lake_variables(pipeline)


def driver_environment(
    hook: SparkSubmitHook | None, env_vars: Mapping[str, Any], secrets: Mapping[str, str], folder: Path
) -> dict[str, str]:
    """The worker's environment with the task's variables, and over all of them the secrets.

    `hook`: None for an application without Spark. In `folder` the application leaves its result.
    """
    # A worker's own PGREPL_STATE_DSN must not stand in for a pipeline that names none.
    inherited = {key: value for key, value in os.environ.items() if key != "PGREPL_STATE_DSN"}
    # Nor a token of other keys, or another endpoint.
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
    environment |= {key: str(value) for key, value in env_vars.items()}
    ours = {FORMAT_VARIABLE: JSON, RESULT_VARIABLE: str(folder / RESULT_FILE), "PYTHONUNBUFFERED": "1"}
    return {**environment, **secrets, **ours}


def properties_with_lineage(
    conf: Mapping[Any, Any] | None, context: Any, *, parent: bool, transport: bool
) -> dict[Any, Any]:
    """Spark's properties with OpenLineage's: of the task (`parent`), of where events go (`transport`)."""
    properties = dict(conf or {})
    if parent:
        properties = inject_parent_job_information_into_spark_properties(properties, context)
    if transport:
        properties = inject_transport_information_into_spark_properties(properties, context)
    return properties
