"""pgrepl_resnapshot: resnapshot tables, by hand, while the others go on.

Trigger it and pick the tables in the form; by API `{"conf": {"tables": ["public.orders"], "reason": "…"}}`;
or `airflow dags test pgrepl_resnapshot -c '{"tables": ["public.orders"]}'`. For a pipeline with patterns the
form has nothing to pick from: write the tables into it, one a line.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.forms import PICKED_TABLES, pipeline_tags, tables_params
from airflow_provider_pgrepl.operators.resnapshot import PgResnapshotOperator

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_resnapshot",
    description="Copy tables of PostgreSQL into the lake again",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # One copy at a time: a run that is triggered meanwhile is queued until this one has ended.
    max_active_runs=1,
    # A run that is triggered while the DAG is paused would wait without a word.
    is_paused_upon_creation=False,
    render_template_as_native_obj=True,
    params={
        **tables_params(PIPELINE_FILE, "Tables to resnapshot"),
        "resync": Param(
            False,
            type="boolean",
            title="Resync",
            description="Compare the tables with the source, and replace only the rows that differ",
        ),
        "reason": Param(None, type=["null", "string"], title="Reason", description="For the log of this run"),
    },
    tags=pipeline_tags(PIPELINE_FILE),
    doc_md=__doc__,
) as dag:
    PgResnapshotOperator(
        task_id="resnapshot",
        pipeline=PIPELINE_FILE,
        tables=PICKED_TABLES,
        reason="{{ params.reason }}",
        resync="{{ params.resync }}",
        spark_conn_id=os.environ.get("PGREPL_SPARK_CONN_ID"),
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
