"""Many tables that change a little each: the fixed cost of a table must not add up to a large delay."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.steady import CHANGES, SteadyLoad, tables_of, updates_in_turn
from benchmarks.updated_table import WARM_UP_S
from benchmarks.visibility import Commits, delays, table_history

_ROWS = 10_000
_RATES = {100: 100, 300: 500}
"""Changes per second over all tables in turn, by the number of tables."""
_LIMITS_S = {100: 5.0, 300: 10.0}
_SECONDS = 60


def run(folder: Path, scale: float) -> Figure:
    """Measure each number of tables, with its own database and pipeline."""
    found = {count: _measure(folder / str(count), count, scale) for count in _RATES}
    p95 = {count: float(np.percentile(seconds, 95)) for count, seconds in found.items()}
    loads = [f"{count} tables, {rate} changes/s" for count, rate in _RATES.items()]
    return Figure(
        f"commit → visible in {' and in '.join(loads)} over all",
        f"p95 {', '.join(f'{seconds:.1f}' for seconds in p95.values())} s",
        "",
        "",
        f"p95 ≤ {', '.join(f'{limit:g}' for limit in _LIMITS_S.values())} s",
        all(p95[count] <= limit for count, limit in _LIMITS_S.items()),
        {
            f"{count} tables: p50, p95, longest s": [
                round(float(value), 2) for value in np.percentile(seconds, [50, 95, 100])
            ]
            for count, seconds in found.items()
        },
    )


def _measure(folder: Path, count: int, scale: float) -> np.ndarray:
    """Return the seconds from COMMIT until a table shows it, for each table of each transaction."""
    tables = [f"public.bench_{number}" for number in range(1, max(CHANGES, int(count * scale)) + 1)]
    del tables[len(tables) // CHANGES * CHANGES :]
    with running_source() as source:
        for table in tables:
            workload.make_table(source, _ROWS, table)
        pipeline = pipelines.make_pipeline(folder, "many", *tables)
        load = SteadyLoad(source.dsn, _RATES[count] / CHANGES, updates_in_turn(tables, _ROWS))
        with running_app.streaming(source, pipeline) as app:
            load.start()
            time.sleep(WARM_UP_S)
            first = len(load.commits)
            time.sleep(_SECONDS * max(scale, 0.2))
            commits = load.stop()
            for number, (lsn, _) in list(enumerate(commits))[-len(tables) // CHANGES :]:
                running_app.wait_shown(app, pipeline, tables_of(tables, number), LSN(lsn))
    return _by_table(pipeline, tables, commits, first)


def _by_table(pipeline: Pipeline, tables: list[str], commits: Commits, first: int) -> np.ndarray:
    turns = len(tables) // CHANGES
    found = []
    for number in range(first, first + turns):
        theirs = commits[number::turns]
        found += [delays(theirs, table_history(pipeline, name)) for name in tables_of(tables, number)]
    return np.concatenate(found)
