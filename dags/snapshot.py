"""pgrepl_snapshot: copy the tables of a pipeline into the lake; run by hand, also to resnapshot tables.

The pipeline is the JSON file that PGREPL_PIPELINE_FILE names, or pipeline.json in the folder of this file.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_snapshot",
    description="Copy PostgreSQL tables into the lake",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    max_active_runs=1,
    # A run that is triggered while the DAG is paused would wait without a word.
    is_paused_upon_creation=False,
    render_template_as_native_obj=True,
    params={
        "tables": Param(
            [],
            # Null, too: else the form marks the field as one to be filled in.
            type=["null", "array"],
            items={"type": "string"},
            title="Tables to resnapshot",
            description="One a line, as public.orders; none: copy those that are not in the lake yet",
        ),
        "new_epoch": Param(
            False,
            type="boolean",
            title="New epoch",
            description="Resnapshot all tables, after the slot was lost or the source replaced",
        ),
        "resync": Param(
            False,
            type="boolean",
            title="Resync",
            description="Compare with the source, and replace only the rows that differ: the tables named"
            " above, or all, in a new epoch",
        ),
    },
    tags=["pgrepl"],
    doc_md=__doc__,
) as dag:
    PgSnapshotOperator(
        task_id="snapshot",
        pipeline=PIPELINE_FILE,
        tables="{{ params.tables or [] }}",
        # Without tables, a resync takes all of them, which begins a new epoch.
        new_epoch="{{ params.new_epoch or (params.resync and not params.tables) }}",
        resync="{{ params.resync }}",
        spark_conn_id=os.environ.get("PGREPL_SPARK_CONN_ID"),
        # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
        retries=10,
        retry_delay=timedelta(seconds=30),
    )
