"""A snapshot of named tables and a replication over the stand-in app, for OpenLineage."""

from __future__ import annotations

import os
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

HERE = Path(__file__).parent.parent
PIPELINE = os.environ.get("LINEAGE_PIPELINE", '{"name": "shop", "lake": "/nowhere", "tables": ["public.*"]}')

with DAG("lineage", schedule=None):
    given = {
        "pipeline": PIPELINE,
        "application": str(HERE / "stand_in.py"),
        "application_args": os.environ.get("STAND_IN_ARGS", "--journal /dev/null --exit 0").split(),
        "spark_binary": str(HERE / "spark-submit-stand-in"),
        "preflight": False,
        "poll_interval_s": 0.1,
    }
    snapshot = PgSnapshotOperator(task_id="snapshot", tables="public.notes", **given)
    snapshot >> PgReplicationOperator(task_id="replicate", mode="caught_up", **given)
