"""pgrepl_read_lake: run when the lake has new changes of a table, at most once every ten minutes.

The triggerer adds an event to the asset of the table. The task logs the consistent point of each event.
Replace it by your own, which reads the lake at this point with `open_lake(…).at(lsn)`.
"""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, task

from airflow_provider_pgrepl.assets import lake_asset

ORDERS = lake_asset(
    os.environ.get("PGREPL_PIPELINE", "example"),
    os.environ.get("PGREPL_TABLE", "public.orders"),
    every_s=600,
)

with DAG(
    "pgrepl_read_lake",
    description="Run after changes of a lake table",
    schedule=[ORDERS],
    catchup=False,
    max_active_runs=1,
    tags=["pgrepl"],
    doc_md=__doc__,
) as dag:
    # On a busy host, Airflow may run tasks minutes before its API answers, which they need.
    @task(inlets=[ORDERS], retries=10, retry_delay=timedelta(seconds=30))  # type: ignore[untyped-decorator]
    def read(triggering_asset_events: Any = None) -> None:
        """Log the consistent point of each event that started this run."""
        log = logging.getLogger(__name__)
        for event in (triggering_asset_events or {}).get(ORDERS, []):
            point = event.extra["payload"]
            log.info(
                "%s is complete up to %s, committed %s", point["table"], point["lsn"], point["commit_time"]
            )

    read()
