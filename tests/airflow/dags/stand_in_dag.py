"""The operators over the stand-in app, whose behavior the environment chooses."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator
from airflow_provider_pgrepl.operators.verify import PgVerifyOperator

HERE = Path(__file__).parent.parent
LAKE = f"{os.environ['AIRFLOW_HOME']}/no-lake"
ARGS = os.environ.get("STAND_IN_ARGS", "--journal /dev/null --exit 0").split()
FIELDS = {"name": "shop", "tables": ["public.*"], "lake": LAKE}
COMMON = {
    "pipeline": os.environ.get("STAND_IN_PIPELINE", FIELDS),
    "application": str(HERE / "stand_in.py"),
    "application_args": ARGS,
    "spark_binary": os.environ.get("STAND_IN_SUBMIT", str(HERE / "spark-submit-stand-in")),
    "preflight": False,
    "poll_interval_s": 0.1,
    "stop_timeout_s": 20,
    "retries": 1,
    "retry_delay": timedelta(seconds=0),
}

with DAG(
    "stand_in",
    schedule=None,
    params={"mode": Param("caught_up", enum=["continuous", "caught_up"])},
) as stand_in:
    PgReplicationOperator(task_id="replicate", mode="{{ params.mode }}", **COMMON)

CHOICES = {
    "name": "shop",
    "tables": ("public.orders", "public.{{ params.more }}"),
    "lake": f"{LAKE}/{{{{ params.more }}}}",
    "types": {"public.orders.total": "decimal(20,{{ params.scale }})"},
    "text_columns": ("public.orders.grid",),
    "exclude_columns": ["public.orders.secret"],
    "per_column": {"public.orders.due": {"infinity": "{{ params.infinity }}"}},
    "per_table": {"public.orders": {"history": True, "deletes": "soft"}},
}
with DAG(
    "stand_in_choices", schedule=None, params={"more": "audit", "scale": 4, "infinity": "null"}
) as stand_in_choices:
    PgSnapshotOperator(task_id="snapshot", **{**COMMON, "pipeline": CHOICES})

with DAG("stand_in_verify", schedule=None) as stand_in_verify:
    PgVerifyOperator(
        task_id="verify",
        tables=["public.a"],
        check="text",
        sample="1%",
        show_keys="true",
        repair="true",
        **COMMON,
    )

with DAG("stand_in_snapshot", schedule=None) as stand_in_snapshot:
    PgSnapshotOperator(
        task_id="snapshot", tables="public.a, public.b", new_epoch="True", resync=True, **COMMON
    )
