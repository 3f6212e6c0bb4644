"""pgrepl_tables: add, pause, resume, retry, maintain or remove tables, by hand.

Trigger it and fill in the form; by API: `{"conf": {"action": "pause", "tables": ["public.orders"]}}`.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import DAG, Param, task

from airflow_provider_pgrepl.operators.forms import PICKED_TABLES, pipeline_tags, tables_params
from airflow_provider_pgrepl.operators.maintenance import PgMaintenanceOperator
from airflow_provider_pgrepl.operators.resnapshot import PgAddTablesOperator
from airflow_provider_pgrepl.operators.tables import (
    PgPauseTablesOperator,
    PgRemoveTablesOperator,
    PgResumeTablesOperator,
    PgRetryTablesOperator,
)

PIPELINE_FILE = os.environ.get("PGREPL_PIPELINE_FILE", str(Path(__file__).with_name("pipeline.json")))
COMMON = {"pipeline": PIPELINE_FILE, "tables": PICKED_TABLES}
ACTIONS = {
    "add": "Add: copy them, and keep them current",
    "pause": "Pause: keep their changes in the changelog without applying them",
    "resume": "Resume: apply the changes of paused tables",
    "retry": "Retry: continue errored tables from the changelog",
    "maintain": "Maintain: compact their small files, and delete unreferenced files",
    "remove": "Remove: the lake tables stay",
}

with DAG(
    "pgrepl_tables",
    description="Add, pause, resume, retry, maintain or remove tables",
    schedule=None,
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=False,
    # A run that is triggered while the DAG is paused would wait without a word.
    is_paused_upon_creation=False,
    render_template_as_native_obj=True,
    # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
    default_args={"retries": 10, "retry_delay": timedelta(seconds=30)},
    params={
        "action": Param(
            "pause", type="string", enum=list(ACTIONS), values_display=ACTIONS, title="What to do"
        ),
        **tables_params(
            PIPELINE_FILE,
            "Tables",
            "None: add all that are new under a pattern, retry all errored ones, maintain all. ",
        ),
    },
    tags=pipeline_tags(PIPELINE_FILE),
    doc_md=__doc__,
) as dag:

    @task.branch
    def choose(params: dict[str, str]) -> str:
        """The task of the action that the form asks for."""
        return params["action"]

    choose() >> [
        PgAddTablesOperator(
            task_id="add",
            spark_conn_id=os.environ.get("PGREPL_SPARK_CONN_ID"),
            # One copy at a time. Other actions do not wait for it.
            max_active_tis_per_dag=1,
            **COMMON,
        ),
        PgPauseTablesOperator(task_id="pause", **COMMON),
        PgResumeTablesOperator(task_id="resume", **COMMON),
        PgRetryTablesOperator(task_id="retry", **COMMON),
        PgMaintenanceOperator(task_id="maintain", pipeline=PIPELINE_FILE, tables=PICKED_TABLES),
        PgRemoveTablesOperator(task_id="remove", **COMMON),
    ]
