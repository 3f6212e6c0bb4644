"""pgrepl_skip: skip the transaction that the server cannot send, by hand.

The error of the replication names its LSN. Pause the DAG of the replication first. The tables that the
transaction may have changed become errored, and need a resnapshot.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.forms import pipeline_tags
from airflow_provider_pgrepl.operators.skip import PgSkipTransactionOperator

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_skip",
    description="Skip a transaction that the server cannot send",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    # A run that is triggered while the DAG is paused would wait without a word.
    is_paused_upon_creation=False,
    render_template_as_native_obj=True,
    params={
        "lsn": Param("", type="string", title="LSN", description="As the error names it: 16/B374D848"),
        "unchanged_tables": Param(
            [],
            type=["null", "array"],
            items={"type": "string"},
            title="Unchanged tables",
            description="Tables that the transaction did not change; they continue. One a line",
        ),
    },
    tags=pipeline_tags(PIPELINE_FILE),
    doc_md=__doc__,
) as dag:
    PgSkipTransactionOperator(
        task_id="skip",
        pipeline=PIPELINE_FILE,
        lsn="{{ params.lsn }}",
        unchanged_tables="{{ params.unchanged_tables or [] }}",
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
