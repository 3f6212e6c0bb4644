"""pgrepl_health: every five minutes, check a pipeline; the run fails while it has a problem.

Failure callbacks, notifiers and deadlines of this DAG alert a person. No app needs to run. The report
is in XCom.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_pgrepl.sensors.health import PgReplicationHealthSensor

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_health",
    description="Check slot, lag, tables and app of a pipeline",
    schedule=timedelta(minutes=5),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["pgrepl"],
    doc_md=__doc__,
) as dag:
    PgReplicationHealthSensor(
        task_id="health",
        pipeline=PIPELINE_FILE,
        fail_on="failure",
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
