"""A snapshot of named tables and a replication over the stand-in application, for OpenLineage."""

from __future__ import annotations

import os

from airflow.sdk import DAG

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator
from tests.airflow.dags.stand_in_dag import COMMON

PIPELINE = os.environ.get("LINEAGE_PIPELINE", '{"name": "shop", "lake": "/nowhere", "tables": ["public.*"]}')

with DAG("lineage", schedule=None):
    given = {**COMMON, "pipeline": PIPELINE}
    snapshot = PgSnapshotOperator(task_id="snapshot", tables="public.notes", **given)
    snapshot >> PgReplicationOperator(task_id="replicate", mode="caught_up", **given)
