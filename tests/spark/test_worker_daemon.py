"""Python workers begin with what their daemon has loaded."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import numpy as np

LEAST_OBJECTS = 50_000
"""Far more than a Python process begins with."""
TASKS = 6


def test_workers_share_what_their_daemon_has_loaded(spark):
    def look(_number: int) -> tuple[int, bool]:
        loaded = "airflow_provider_pgrepl.replication.lake.apply.merge_task" in sys.modules
        return gc.get_freeze_count(), loaded

    for objects, has_loaded in spark.sparkContext.parallelize(range(2), 2).map(look).collect():
        assert has_loaded
        assert objects > LEAST_OBJECTS


def test_the_daemon_has_no_threads_that_end_where_it_forks(spark):
    """Only the memory allocators of pyarrow and deltalake have some, and they handle a fork themselves."""

    def threads(_number: int) -> list[str]:
        tasks = Path(f"/proc/{os.getppid()}/task").glob("*/comm")
        return [name.read_text().strip() for name in tasks]

    names = spark.sparkContext.parallelize([0], 1).map(threads).collect()[0]
    assert len([name for name in names if name != "jemalloc_bg_thd"]) == 1, names


def test_no_two_workers_draw_the_same_numbers(spark, tmp_path):
    def draw(_number: int) -> tuple[int, float]:
        # Until another task is at work, which takes a worker of its own.
        import time

        (tmp_path / str(os.getpid())).touch()
        end = time.monotonic() + 120
        while len(list(tmp_path.iterdir())) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        return os.getpid(), float(np.random.random())

    found = spark.sparkContext.parallelize(range(TASKS), TASKS).map(draw).collect()
    assert len({pid for pid, _ in found}) > 1
    assert len({number for _, number in found}) == TASKS
