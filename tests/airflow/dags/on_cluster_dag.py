"""A snapshot and a replication with their executors on a cluster, all of it as the run's conf says."""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

COMMON = {
    "pipeline": "{{ dag_run.conf['pipeline'] }}",
    "spark_conn_id": "standalone",
    "conf": {
        "spark.pyspark.python": "{{ dag_run.conf['python'] }}",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.executor.memory": "512m",
    },
}

with DAG("on_cluster", schedule=None):
    snapshot = PgSnapshotOperator(task_id="snapshot", **COMMON)
    snapshot >> PgReplicationOperator(task_id="replicate", mode="caught_up", **COMMON)
