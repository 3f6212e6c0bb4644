"""pgrepl_check_migration: apply the SQL of a migration to a copy of the source's schema, and roll it back.

The run fails if a table of the pipeline could not continue. PGREPL_MIGRATION_CONN_ID names the connection of
the copy. Everyone who may trigger this DAG runs SQL there.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.forms import pipeline_tags
from airflow_provider_pgrepl.sensors.drift import PgSchemaDriftSensor

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_check_migration",
    description="Test what a migration would do to the pipeline",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # A run that is triggered while the DAG is paused would wait without a word.
    is_paused_upon_creation=False,
    params={"sql": Param("", type="string", format="multiline", title="SQL of the migration")},
    tags=pipeline_tags(PIPELINE_FILE),
    doc_md=__doc__,
) as dag:
    PgSchemaDriftSensor(
        task_id="check",
        pipeline=PIPELINE_FILE,
        sql="{{ params.sql }}",
        database_conn_id=os.environ.get("PGREPL_MIGRATION_CONN_ID"),
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
