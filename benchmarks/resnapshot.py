"""The lag of nine tables during a resnapshot of the tenth, and their usual lag. All have traffic."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.steady import SteadyLoad, inserts_and_updates
from benchmarks.visibility import Commits, slowest_delays

_OTHERS = tuple(f"public.bench_{number}" for number in range(1, 10))
_COPIED = "public.bench_10"
_ROWS, _ROWS_COPIED = 100_000, 1_000_000
_TRANSACTIONS_PER_S = 50
_WARM_UP_S, _SECONDS = 20, 40
_LIMIT = 2.0


def run(folder: Path, scale: float) -> Figure:
    """Measure the lag of commits before and during a run of the snapshot app.

    The lag of a commit ends when the last of the nine tables shows it.
    """
    with running_source() as source:
        for table in (*_OTHERS, _COPIED):
            workload.create_table(source, table)
            workload.insert(source, 1, _ROWS if table in _OTHERS else _ROWS_COPIED, table)
        pipeline = pipelines.make_pipeline(folder, "resnapshot", *_OTHERS, _COPIED)
        dsn = source.replicator_dsn()
        with running_app.replicating(dsn, pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn())
            tables = (*_OTHERS, _COPIED)
            changes = inserts_and_updates(tables, _ROWS, first_id=_ROWS_COPIED + 1)
            load = SteadyLoad(source.dsn, _TRANSACTIONS_PER_S, changes)
            load.start()
            time.sleep(_WARM_UP_S * max(scale, 0.5))
            usual = (time.time(), time.time() + _SECONDS * scale)
            time.sleep(_SECONDS * scale)
            began = time.time()
            running_app.App("snapshot", dsn, pipeline, "--tables", _COPIED).wait()
            copying = (began, time.time())
            time.sleep(5)
            commits = load.stop()
            running_app.wait_applied(app, pipeline, LSN(commits[-1][0]))
    before, during = (_lags(pipeline, commits, *span) for span in (usual, copying))
    of_usual, meanwhile = (np.percentile(lags, [50, 95]) for lags in (before, during))
    ratio = float(meanwhile[1] / of_usual[1])
    return Figure(
        f"lag of nine tables while a tenth of {_ROWS_COPIED:,} rows is resnapshotted, traffic on all",
        f"p95 {meanwhile[1]:.2f} s",
        f"usual: p95 {of_usual[1]:.2f} s",
        f"{ratio:.2f}",
        f"≤ {_LIMIT:g} × usual",
        ratio <= _LIMIT,
        {
            "usual p50, p95, longest s": [round(float(value), 2) for value in (*of_usual, before.max())],
            "meanwhile p50, p95, longest s": [round(float(value), 2) for value in (*meanwhile, during.max())],
            "resnapshot, with the start of Spark, s": round(copying[1] - copying[0], 1),
        },
    )


def _lags(pipeline: Pipeline, commits: Commits, begin: float, end: float) -> np.ndarray:
    chosen = [commit for commit in commits if begin <= commit[1] < end]
    return slowest_delays(chosen, pipeline, _OTHERS)
