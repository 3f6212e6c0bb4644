"""The apply rate: from the changelog into the merged table, by the real applier on a warm Spark."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.lake.apply.applier import Applier
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import build_session
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from benchmarks import kinds, measuring, pipelines
from benchmarks.figure import Figure, thousands
from benchmarks.kinds import Kind
from benchmarks.source import Source, running_source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_INSERTS, _UPDATES = 1_000_000, 500_000
_WARM_UP = 100_000
_REPEAT = 3
_LIMIT = 250_000


def run(folder: Path, scale: float) -> Figure:
    """Receive a changelog while the applier is held, then measure the time until all of it is merged."""
    inserts, updates = int(_INSERTS * scale), int(_UPDATES * scale)
    with warm_spark() as spark:
        trial = Trial(spark, folder, kinds.PLAIN, inserts, updates)
        rates = [trial.run(f"apply_{number}") for number in range(_REPEAT)]
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


def run_kind(folder: Path, scale: float, kind: Kind) -> Figure:
    """Measure changes of another kind and the same number of plain ones, in turns."""
    inserts, updates = int(kind.inserts * scale), int(kind.updates * scale)
    rates: dict[str, list[float]] = {kind.name: [], kinds.PLAIN.name: []}
    with warm_spark() as spark:
        for number in range(_REPEAT):
            for of in (kind, kinds.PLAIN):
                trial = Trial(spark, folder, of, inserts, updates)
                rates[of.name].append(trial.run(f"apply_{of.name}_{number}"))
    rate, plain = (statistics.median(found) for found in rates.values())
    return Figure(
        f"apply, {kind.title}: {inserts:,} inserts, {updates:,} {kind.change}",
        f"{thousands(rate)} changes/s",
        f"plain rows: {thousands(plain)} changes/s",
        f"{rate / plain:.2f}",
        f"≥ {kind.limit} × plain",
        rate >= kind.limit * plain,
        {name: [round(rate) for rate in found] for name, found in rates.items()},
    )


@contextmanager
def warm_spark() -> Iterator[SparkSession]:
    """Yield a Spark session like that of the replication app, and stop it at the end of the block."""
    quiet = {"spark.log.level": "ERROR"}
    spark = build_session("pgrepl benchmark", "local[2]", quiet, delta=False)
    try:
        yield spark
    finally:
        spark.stop()


@dataclass(frozen=True)
class Trial:
    """A number of changes of one kind, with their own source, changelog and lake."""

    spark: SparkSession
    folder: Path
    kind: Kind
    inserts: int
    updates: int

    def run(self, name: str) -> float:
        """Return the number of changes that are applied per second."""
        with running_source() as source, StateDatabase(source.dsn, "benchmark") as state_db:
            state_db.migrate()
            self.kind.create(source)
            pipeline = pipelines.make_pipeline(self.folder, name, self.kind.table)
            pipelines.publish(source.dsn, pipeline)
            record = pipelines.take_snapshot(self.spark, source.dsn, pipeline, state_db)
            with (
                _applying(Applier(self.spark, pipeline, state_db, record)) as applier,
                measuring.recorded(source.dsn, pipeline, applied=lambda: applier.progress),
            ):
                self._warm_up(source, pipeline, applier)
                seconds = self._time(source, pipeline, applier)
        return (self.inserts + self.updates) / seconds

    def _warm_up(self, source: Source, pipeline: Pipeline, applier: Applier) -> None:
        """Apply some changes to warm up. Their rows are deleted again."""
        rows = min(_WARM_UP, self.inserts)
        self.kind.fill(source, rows, rows // 2)
        source.execute(f"delete from {self.kind.table}")
        with pipelines.receiving(source.dsn, pipeline) as receiver:
            end = source.end_lsn()
            receiver.request_keepalive()
            pipelines.wait_received(receiver, end)
        _wait_applied(applier, end)

    def _time(self, source: Source, pipeline: Pipeline, applier: Applier) -> float:
        with applier.held():
            self.kind.fill(source, self.inserts, self.updates)
            end = source.end_lsn()
            with pipelines.receiving(source.dsn, pipeline) as receiver:
                pipelines.wait_received(receiver, end)
            started = time.perf_counter()
        _wait_applied(applier, end)
        return time.perf_counter() - started


@contextmanager
def _applying(applier: Applier) -> Iterator[Applier]:
    applier.start()
    try:
        yield applier
        if applier.error is not None:
            raise applier.error
    finally:
        applier.stop()


def _wait_applied(applier: Applier, lsn: LSN, timeout_s: float = 300) -> None:
    deadline = time.monotonic() + timeout_s
    while applier.progress.applied_lsn + 1 < lsn:
        if applier.error is not None:
            raise applier.error
        if time.monotonic() > deadline:
            raise TimeoutError(f"the lake is at {applier.progress.applied_lsn}, not at {lsn}")
        time.sleep(0.005)
