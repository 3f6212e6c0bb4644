"""The health sensor on the worker and in the triggerer, over the pipeline that the environment gives."""

from __future__ import annotations

import os
from datetime import timedelta

from airflow.sdk import DAG

from airflow_provider_pgrepl.sensors.health import PgReplicationHealthSensor

PIPELINE = os.environ.get("DRIFT_PIPELINE", '{"name": "shop", "lake": "/nowhere", "tables": ["public.*"]}')

for mode, deferrable in {"poke": False, "deferrable": True}.items():
    with DAG(f"health_{mode}", schedule=None) as dag:
        PgReplicationHealthSensor(
            task_id="health",
            pipeline=PIPELINE,
            deferrable=deferrable,
            is_continuous=False,
            retries=1,
            retry_delay=timedelta(seconds=0),
        )
