"""pgrepl_replicate: keep the lake current, always; begins again by itself when it has ended.

The pipeline is the JSON file that PGREPL_PIPELINE_FILE names, or pipeline.json in the folder of this file.
Run pgrepl_snapshot first. To bring the lake up to date once, as in CI:
`airflow dags test pgrepl_replicate -c '{"mode": "caught_up"}'`
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))

with DAG(
    "pgrepl_replicate",
    description="Keep the lake current with PostgreSQL",
    schedule="@continuous",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # A wrong configuration would fail and begin again at once: after three runs the DAG pauses itself.
    max_active_runs=1,
    max_consecutive_failed_dag_runs=3,
    params={
        "mode": Param(
            "continuous",
            type="string",
            title="Run",
            enum=["continuous", "caught_up"],
            values_display={"continuous": "Until stopped", "caught_up": "Until caught up"},
        ),
    },
    tags=["pgrepl"],
    doc_md=__doc__,
) as dag:
    PgReplicationOperator(
        task_id="replicate",
        pipeline=PIPELINE_FILE,
        mode="{{ params.mode }}",
        spark_conn_id=os.environ.get("PGREPL_SPARK_CONN_ID"),
        # Practically unlimited: errors that a retry cannot fix fail at once, and each restart of Airflow
        # uses up one retry.
        retries=10_000,
        retry_delay=timedelta(seconds=30),
        # Once a day the run succeeds, and the next one adopts the app: tries and log begin again.
        hand_over_after_s=86_400,
    )
