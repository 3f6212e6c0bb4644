"""From the changelog into the merged table, through the real applier on a Spark that is warm."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.apply import Applier
from airflow_provider_pgrepl.replication.lake.session import build_session
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.state.store import Store
from benchmarks import pipelines, workload
from benchmarks.figure import Figure, thousands
from benchmarks.source import Source, running_source

_INSERTS, _UPDATES = 1_000_000, 500_000
_WARM_UP = 100_000
_REPEAT = 3
_LIMIT = 250_000


def run(folder: Path, scale: float) -> Figure:
    """The changelog is received while the applier is held; then the time until all of it is merged."""
    inserts, updates = int(_INSERTS * scale), int(_UPDATES * scale)
    spark = build_session("pgrepl benchmark", "local[2]", {"spark.log.level": "ERROR"}, delta=False)
    rates = []
    try:
        for number in range(_REPEAT):
            with running_source() as source, Store(source.dsn, "benchmark") as store:
                store.migrate()
                workload.create_table(source)
                pipeline = pipelines.make_pipeline(folder, f"apply_{number}", workload.TABLE)
                pipelines.publish(source.dsn, pipeline)
                record = pipelines.take_snapshot(spark, source.dsn, pipeline, store)
                with _applying(Applier(spark, pipeline, store, record)) as applier:
                    _warm_up(source, pipeline, applier)
                    seconds = _time(source, pipeline, applier, inserts, updates)
            rates.append((inserts + updates) / seconds)
    finally:
        spark.stop()
    rate = statistics.median(rates)
    return Figure(
        f"apply: the same changelog, {(inserts + updates) / 1e6:g} M changes → merged table, hot",
        f"{thousands(rate)} changes/s",
        "",
        "",
        f"≥ {thousands(_LIMIT)} changes/s",
        rate >= _LIMIT,
        {"changes/s": [round(rate) for rate in rates]},
    )


@contextmanager
def _applying(applier: Applier) -> Iterator[Applier]:
    query = applier.start()
    try:
        yield applier
        if applier.error is not None:
            raise applier.error
    finally:
        applier.stop(query)


def _warm_up(source: Source, pipeline: Pipeline, applier: Applier) -> None:
    """A first few batches on rows of their own, which go again."""
    workload.fill(source, _WARM_UP, _WARM_UP // 2)
    source.execute(f"delete from {workload.TABLE}")
    with pipelines.receiving(source.dsn, pipeline) as receiver:
        end = source.end_lsn()
        receiver.request_keepalive()
        pipelines.wait_received(receiver, end)
    _wait_applied(applier, end)


def _time(source: Source, pipeline: Pipeline, applier: Applier, inserts: int, updates: int) -> float:
    with applier.batch_lock:
        workload.fill(source, inserts, updates)
        end = source.end_lsn()
        with pipelines.receiving(source.dsn, pipeline) as receiver:
            pipelines.wait_received(receiver, end)
        started = time.perf_counter()
    _wait_applied(applier, end)
    return time.perf_counter() - started


def _wait_applied(applier: Applier, lsn: LSN, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while applier.progress.applied_lsn + 1 < lsn:
        if applier.error is not None:
            raise applier.error
        if time.monotonic() > deadline:
            raise TimeoutError(f"the lake is at {applier.progress.applied_lsn}, not at {lsn}")
        time.sleep(0.005)
