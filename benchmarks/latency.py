"""The delay from COMMIT at the source until the merged tables show the change, under a light steady load."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
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


LOAD = f"{_TRANSACTIONS_PER_S * 10:,} changes/s over five tables"


@dataclass(frozen=True)
class Seen:
    """Seconds until all tables of a transaction show it, and until a consistent point includes it."""

    p50_s: float
    p95_s: float
    longest_s: float
    point_p50_s: float
    point_p95_s: float
    transactions: int

    def __str__(self) -> str:
        return f"p50 {self.p50_s:.2f} s, p95 {self.p95_s:.2f} s"

    def numbers(self) -> dict[str, float]:
        """Return all numbers, rounded."""
        return {name: round(number, 2) for name, number in asdict(self).items()}


def run(folder: Path, scale: float) -> Figure:
    """Measure the delay under the load of `measure`."""
    seen = measure(folder, scale)
    return Figure(
        f"commit → visible in the merged tables, {LOAD}",
        str(seen),
        "",
        "",
        f"p50 ≤ {_P50_LIMIT_S:g} s, p95 ≤ {_P95_LIMIT_S:g} s",
        seen.p50_s <= _P50_LIMIT_S and seen.p95_s <= _P95_LIMIT_S,
        seen.numbers(),
    )


def measure(folder: Path, scale: float) -> Seen:
    """Return the delays of a run.

    The client measures the commit times. The times of the lake tables' log files are the times of visibility.
    """
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
    points = delays(measured, point_history(pipeline))
    p50, p95, longest = (float(value) for value in np.percentile(slowest, [50, 95, 100]))
    point_p50, point_p95 = (float(value) for value in np.percentile(points, [50, 95]))
    return Seen(p50, p95, longest, point_p50, point_p95, len(measured))
