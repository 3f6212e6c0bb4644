"""Receiving and applying at the same time, with source and load on the same cores: the sustained rate."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure, thousands
from benchmarks.source import running_source

_RATE = 102_000
_LIMIT = 100_000
_SECONDS = 180
_WARM_UP_S = 20
_ROWS = 200_000
_SAMPLE_S = 1.0
_LAG_LIMIT_S = 10.0


@dataclass(frozen=True)
class _Sample:
    """The newest consistent point at one time: the number of changes up to it, and its lag in seconds."""

    at_s: float
    applied: int
    lag_s: float


def run(folder: Path, scale: float) -> Figure:
    """Measure if changes arrive in the lake as fast as they are committed, with a lag within the limit."""
    with running_source() as source:
        workload.create_table(source)
        workload.insert(source, 1, _ROWS)
        pipeline = pipelines.make_pipeline(folder, "both", workload.TABLE)
        with running_app.replicating(source.replicator_dsn(), pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn())
            load = workload.SteadyLoad(source, _ROWS + 1, _RATE, max(_SECONDS * scale, 2 * _WARM_UP_S))
            load.start()
            samples = _watch(app, pipeline, load)
            ended = time.time()
            running_app.wait_applied(app, pipeline, LSN(load.committed.lsns[-1]), 300)
            tail_s = time.time() - ended
    if load.error is not None:
        raise load.error
    hot = [sample for sample in samples if sample.at_s >= _WARM_UP_S]
    arrived = (hot[-1].applied - hot[0].applied) / (hot[-1].at_s - hot[0].at_s)
    committed = load.committed.total / load.seconds
    # Use the lower rate: if the source is too slow for the load, the rate of arrival alone proves nothing.
    rate = min(arrived, committed)
    lag = max(sample.lag_s for sample in hot)
    return Figure(
        f"both at once, {samples[-1].at_s:.0f} s, the source on the same cores",
        f"{thousands(rate)} changes/s, lag ≤ {lag:.1f} s",
        "",
        "",
        f"≥ {thousands(_LIMIT)} changes/s, lag ≤ {_LAG_LIMIT_S:g} s",
        rate >= _LIMIT and lag <= _LAG_LIMIT_S,
        {
            "committed changes/s": round(committed),
            "arrived changes/s": round(arrived),
            "lag s each 10 s": [round(sample.lag_s, 1) for sample in samples[9::10]],
            "caught up after s": round(tail_s, 1),
        },
    )


def _watch(app: running_app.App, pipeline: Pipeline, load: workload.SteadyLoad) -> list[_Sample]:
    samples, started = [], time.time()
    while load.is_alive():
        load.join(_SAMPLE_S)
        app.check()
        lsn, now = running_app.applied_lsn(pipeline), time.time()
        applied, lag = load.committed.applied(lsn), load.committed.lag_s(lsn, now)
        samples.append(_Sample(now - started, applied, lag))
    return samples
