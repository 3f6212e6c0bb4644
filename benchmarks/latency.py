"""From COMMIT at the source until the change can be read in the merged tables, under a light steady load."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.lsn import LSN
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.steady import SteadyLoad, inserts_and_updates
from benchmarks.visibility import delays, point_history, slowest_delays

_TABLES = tuple(f"public.bench_{number}" for number in range(1, 6))
_ROWS = 100_000
_TRANSACTIONS_PER_S = 100
_WARM_UP_S, _SECONDS = 20, 60
_P50_LIMIT_S, _P95_LIMIT_S = 1.0, 1.5


def run(folder: Path, scale: float) -> Figure:
    """Times of commits are the client's, times of visibility the log files' of the lake tables."""
    with running_source() as source:
        for table in _TABLES:
            workload.create_table(source, table)
            workload.insert(source, 1, _ROWS, table)
        pipeline = pipelines.make_pipeline(folder, "latency", *_TABLES)
        with running_app.streaming(source, pipeline) as app:
            warm = int(_WARM_UP_S * max(scale, 0.5))
            load = SteadyLoad(source.dsn, _TRANSACTIONS_PER_S, inserts_and_updates(_TABLES, _ROWS))
            load.start()
            time.sleep(warm + _SECONDS * scale)
            commits = load.stop()
            running_app.wait_applied(app, pipeline, LSN(commits[-1][0]))
    measured = [commit for commit in commits if commit[1] >= commits[0][1] + warm]
    slowest = slowest_delays(measured, pipeline, _TABLES)
    p50, p95 = np.percentile(slowest, [50, 95])
    points = np.percentile(delays(measured, point_history(pipeline)), [50, 95])
    return Figure(
        f"commit → visible in the merged tables, {_TRANSACTIONS_PER_S * 10:,} changes/s over five tables",
        f"p50 {p50:.2f} s, p95 {p95:.2f} s",
        "",
        "",
        f"p50 ≤ {_P50_LIMIT_S:g} s, p95 ≤ {_P95_LIMIT_S:g} s",
        bool(p50 <= _P50_LIMIT_S and p95 <= _P95_LIMIT_S),
        {
            "p50, p95, longest s": [round(float(value), 2) for value in (p50, p95, slowest.max())],
            "to the consistent point: p50, p95 s": [round(float(value), 2) for value in points],
            "transactions": len(measured),
        },
    )
