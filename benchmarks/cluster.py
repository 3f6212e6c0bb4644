"""Two executors of a standalone cluster with one core each, compared with local[2] on the same two cores."""

from __future__ import annotations

import multiprocessing
import os
import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.spark.session import build_session
from benchmarks import kinds
from benchmarks.apply import Trial, warm_spark
from benchmarks.figure import Figure, thousands
from benchmarks.snapshot import copy, prepared
from demo.spark_cluster import running_cluster

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROWS = 5_000_000
_INSERTS, _UPDATES = 1_000_000, 500_000
_REPEAT, _COPIES, _TRIALS = 3, 2, 2
_PLACES = ("local[2]", "two executors")
_LIMIT = 1.0


def run(folder: Path, scale: float) -> Figure:
    """Measure snapshots and merges of a changelog on each of `_PLACES`, in turns."""
    rates: dict[str, dict[str, list[float]]] = {
        work: {place: [] for place in _PLACES} for work in ("snapshot", "apply")
    }
    for number in range(_REPEAT):
        for place in _PLACES:
            # Use a new process for each: a process has one Spark session.
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as own:
                found = own.submit(_rates, place, folder, number, scale).result()
            for work, each in found.items():
                rates[work][place] += each
    medians = {work: [statistics.median(by[place]) for place in _PLACES] for work, by in rates.items()}
    shares = {work: cluster / local for work, (local, cluster) in medians.items()}
    told = [f"{work} {thousands(by[1])}/s" for work, by in medians.items()]
    peers = [f"{work} {thousands(by[0])}/s" for work, by in medians.items()]
    return Figure(
        f"two executors of a standalone cluster: {_ROWS * scale / 1e6:g} M rows copied, 1.5 M changes merged",
        ", ".join(told),
        f"local[2]: {', '.join(peers)}",
        ", ".join(f"{share:.2f}" for share in shares.values()),
        f"≥ {_LIMIT} × local[2]",
        min(shares.values()) >= _LIMIT,
        {
            f"{work} {place}": [round(rate) for rate in found]
            for work, by in rates.items()
            for place, found in by.items()
        },
    )


def _rates(place: str, folder: Path, number: int, scale: float) -> dict[str, list[float]]:
    """Return rates of copies and merges on warm executors: the first of each is not counted."""
    rows, inserts, updates = (int(count * scale) for count in (_ROWS, _INSERTS, _UPDATES))
    name = f"cluster_{_PLACES.index(place)}_{number}"
    with _spark(place, folder / name) as spark:
        trial = Trial(spark, folder, kinds.PLAIN, inserts, updates)
        applied = [trial.run(f"{name}_apply_{each}") for each in range(1 + _TRIALS)]
        # `prepared` stops the session at its end.
        with prepared(folder, rows, spark) as (_, source, store):
            seconds = [copy(spark, source, store, folder, f"{name}_{each}") for each in range(1 + _COPIES)]
    copied = [rows / each for each in seconds]
    return {"snapshot": copied[1:], "apply": applied[1:]}


@contextmanager
def _spark(place: str, folder: Path) -> Iterator[SparkSession]:
    if place == _PLACES[0]:
        with warm_spark() as spark:
            yield spark
        return
    with running_cluster(folder) as cluster:
        # Set the variable directly: only spark-submit sets it from spark.pyspark.python. This process runs
        # nothing but this session.
        os.environ["PYSPARK_PYTHON"] = str(cluster.python)
        settings = {
            "spark.log.level": "ERROR",
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.memory": "512m",
        }
        spark = build_session("pgrepl benchmark", cluster.url, settings, delta=False)
        try:
            yield spark
        finally:
            spark.stop()
