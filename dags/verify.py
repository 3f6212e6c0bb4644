"""pgrepl_verify: compare the lake with its source, each night; run by hand for some tables or a repair.

The pipeline is the JSON file that PGREPL_PIPELINE_FILE names, else pipeline.json in the folder of this file.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.forms import pipeline_tags
from airflow_provider_pgrepl.operators.verify import PgVerifyOperator

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_verify",
    description="Compare the lake with PostgreSQL",
    schedule="0 3 * * *",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    render_template_as_native_obj=True,
    params={
        "tables": Param(
            [],
            # Null, too: else the form marks the field as one to be filled in.
            type=["null", "array"],
            items={"type": "string"},
            title="Tables to compare",
            description="One a line, as public.orders; none: all",
        ),
        "show_keys": Param(
            False,
            type="boolean",
            title="Show keys",
            description="Name the keys of rows that differ, in the log and in XCom",
        ),
        "repair": Param(
            False,
            type="boolean",
            title="Repair",
            description="Replace the rows of the lake that differ by those of PostgreSQL",
        ),
    },
    tags=pipeline_tags(PIPELINE_FILE),
    doc_md=__doc__,
) as dag:
    PgVerifyOperator(
        task_id="verify",
        pipeline=PIPELINE_FILE,
        tables="{{ params.tables or [] }}",
        show_keys="{{ params.show_keys }}",
        repair="{{ params.repair }}",
        spark_conn_id=os.environ.get("PGREPL_SPARK_CONN_ID"),
        retries=2,
        retry_delay=timedelta(minutes=10),
    )
