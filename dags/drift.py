"""pgrepl_drift: every ten minutes, look for DDL that stops a table; the run fails while there is any.

Changes that the lake follows by itself are only reported. The report is in XCom.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG

from airflow_provider_pgrepl.sensors.drift import PgSchemaDriftSensor

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_drift",
    description="Look for DDL that stops a table",
    schedule=timedelta(minutes=10),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    tags=["pgrepl"],
    doc_md=__doc__,
) as dag:
    PgSchemaDriftSensor(
        task_id="drift",
        pipeline=PIPELINE_FILE,
        fail_on="unsafe",
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
