"""The drift sensor in its modes, over the pipeline that the environment gives."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG, Param

from airflow_provider_pgrepl.sensors.drift import PgSchemaDriftSensor

PIPELINE = os.environ.get("DRIFT_PIPELINE", '{"name": "shop", "lake": "/nowhere", "tables": ["public.*"]}')
COMMON = {"pipeline": PIPELINE, "poke_interval": 0.1, "retries": 1, "retry_delay": timedelta(seconds=0)}

for mode, chosen in {
    "poke": {},
    "deferrable": {"deferrable": True},
    "waiting": {"until_drift": True, "timeout": 1},
    "waiting_deferrable": {"until_drift": True, "timeout": 1, "deferrable": True},
    "soft": {"soft_fail": True},
    "soft_deferrable": {"soft_fail": True, "deferrable": True},
}.items():
    with DAG(
        f"drift_{mode}",
        schedule=None,
        params={"fail_on": Param("unsafe", type="string"), "mark_errored": True},
    ) as dag:
        PgSchemaDriftSensor(
            task_id="drift",
            fail_on="{{ params.fail_on }}",
            mark_errored="{{ params.mark_errored }}",
            **COMMON,
            **chosen,
        )
