"""Python workers begin with what merging needs."""

from __future__ import annotations

import gc
import sys

LEAST_OBJECTS = 50_000
"""Far more than a Python process begins with."""


def test_workers_share_what_their_daemon_has_loaded(spark):
    def look(_number: int) -> tuple[int, bool]:
        loaded = "airflow_provider_pgrepl.replication.lake.applying.merge_job" in sys.modules
        return gc.get_freeze_count(), loaded

    for objects, has_loaded in spark.sparkContext.parallelize(range(2), 2).map(look).collect():
        assert has_loaded
        assert objects > LEAST_OBJECTS
