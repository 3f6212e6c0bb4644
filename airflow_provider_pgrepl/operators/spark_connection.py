"""The Airflow connection that SparkSubmitHook finds its master by; without one it would go to YARN."""

from __future__ import annotations

import os

from airflow.providers.apache.spark.hooks.spark_submit import SparkSubmitHook
from airflow.sdk import Connection

LOCAL_CONN_ID = "pgrepl_local_spark"


def ensure_connection(conn_id: str | None, master: str) -> None:
    """Make sure that the connection is there; for None, that LOCAL_CONN_ID leads to `master` from here on.

    Raises Airflow's error for a connection that is not there, which the hook would pass over.
    """
    if conn_id is not None:
        SparkSubmitHook.get_connection(conn_id)
        return
    os.environ[f"AIRFLOW_CONN_{LOCAL_CONN_ID.upper()}"] = Connection(
        conn_id=LOCAL_CONN_ID, conn_type="spark", host=master
    ).as_json()
