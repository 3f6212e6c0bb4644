"""The sensor of applied transactions on the worker and in the triggerer, and a DAG scheduled by an asset."""

from __future__ import annotations

import os

from airflow.sdk import DAG, task

from airflow_provider_pgrepl.assets import lake_asset
from airflow_provider_pgrepl.sensors.applied import PgAppliedSensor

PIPELINE = os.environ.get("DRIFT_PIPELINE", '{"name": "shop", "lake": "/nowhere", "tables": ["public.*"]}')

for mode, deferrable in {"poke": False, "deferrable": True}.items():
    with DAG(f"applied_{mode}", schedule=None) as dag:
        PgAppliedSensor(
            task_id="applied",
            pipeline=PIPELINE,
            tables="{{ ['public.a'] }}",
            as_of="2026-01-31T09:00:00+00:00",
            deferrable=deferrable,
            poke_interval=0.1,
            timeout=0.5,
        )

with DAG(
    "asset_reader",
    schedule=[lake_asset("shop", "public.a", every_s=0.2)],
    is_paused_upon_creation=False,
):

    @task
    def read() -> None:
        """Do nothing."""

    read()
