"""Nine small hot tables and a large one with scattered updates, which must not delay the small ones."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.steady import SteadyLoad, inserts_and_updates, random_updates
from benchmarks.updated_table import TRANSACTIONS_PER_S, WARM_UP_S
from benchmarks.visibility import slowest_delays

_SMALL = tuple(f"public.bench_{number}" for number in range(1, 10))
_LARGE = "public.bench_10"
_ROWS, _ROWS_LARGE = 100_000, 50_000_000
_SMALL_PER_S = 50
_SECONDS = 60
_LIMIT = 1.3


def run(folder: Path, scale: float) -> Figure:
    """Measure the lag of commits without and with traffic on the large table.

    The lag of a commit ends when the last of the nine tables shows it.
    """
    rows, seconds = int(_ROWS_LARGE * scale), _SECONDS * max(scale, 0.2)
    with running_source() as source:
        for table in _SMALL:
            workload.make_table(source, _ROWS, table)
        workload.make_table(source, rows, _LARGE)
        pipeline = pipelines.make_pipeline(folder, "neighbors", *_SMALL, _LARGE)
        small = SteadyLoad(source.dsn, _SMALL_PER_S, inserts_and_updates(_SMALL, _ROWS))
        changes = random_updates(_LARGE, range(1, rows + 1))
        large = SteadyLoad(source.dsn, TRANSACTIONS_PER_S, changes)
        with running_app.streaming(source, pipeline) as app:
            small.start()
            alone = _watch(small, seconds)
            large.start()
            beside = _watch(small, seconds)
            ends = {_SMALL: small.stop(), (_LARGE,): large.stop()}
            for tables, commits in ends.items():
                running_app.wait_shown(app, pipeline, tables, LSN(commits[-1][0]))
    usual, meanwhile = (
        np.percentile(slowest_delays(small.commits[span], pipeline, _SMALL), [50, 95])
        for span in (alone, beside)
    )
    ratio = float(meanwhile[1] / usual[1])
    return Figure(
        f"nine hot tables of {_ROWS:,} rows, with 1,000 updates/s of any of a tenth's {rows / 1e6:g} M",
        f"p95 {meanwhile[1]:.2f} s",
        f"without these: p95 {usual[1]:.2f} s",
        f"{ratio:.2f}",
        f"≤ {_LIMIT:g} × without",
        ratio <= _LIMIT,
        {
            "without p50, p95 s": [round(float(value), 2) for value in usual],
            "with p50, p95 s": [round(float(value), 2) for value in meanwhile],
            "large table, changes": len(large.commits) * 10,
        },
    )


def _watch(load: SteadyLoad, seconds: float) -> slice:
    """Wait for the warm-up, then for `seconds`, and return the range of the commits in the latter."""
    time.sleep(WARM_UP_S)
    first = len(load.commits)
    time.sleep(seconds)
    return slice(first, len(load.commits))
