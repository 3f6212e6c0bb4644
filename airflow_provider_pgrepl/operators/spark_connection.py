"""The Airflow connection that SparkSubmitHook finds its master by; without one it would go to YARN."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk import Connection
from airflow.sdk.exceptions import AirflowNotFoundException

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.replication import missing_connection

LOCAL_CONN_ID = "pgrepl_local_spark"


def ensure_connection(conn_id: str | None, master: str) -> None:
    """Make sure that the connection is there; for None, that LOCAL_CONN_ID leads to `master` from here on.

    Raises AirflowNotFoundException for a connection that is not there, which the hook would pass over.
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
    """Whether the driver is to run on the cluster, by what SparkSubmitHook knows of the connection.

    Raises ConfigError for a standalone cluster, on which Spark runs no driver in Python:
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
