"""The CPU time, memory and commits of an idle pipeline, compared with an idle Spark stream."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.lake.consistent_points import points_uri
from benchmarks import pipelines, processes, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.visibility import commits_between

_TABLES = tuple(f"public.bench_{number}" for number in range(1, 6))
_ROWS = 100_000
_SETTLE_S, _SECONDS = 60, 180
_LIMIT_CPU, _LIMIT_MB, _LIMIT_COMMITS = 3.0, 600, 1.0


def run(folder: Path, scale: float) -> Figure:
    """Measure an idle pipeline. All tables have changed once, so that all processes have started."""
    seconds = _SECONDS * max(scale, 0.1)
    with running_source() as source:
        for table in _TABLES:
            workload.make_table(source, _ROWS, table)
        pipeline = pipelines.make_pipeline(folder, "idle", *_TABLES)
        with running_app.streaming(source, pipeline) as app:
            running_app.wait_shown(app, pipeline, _TABLES, workload.touch(source, _TABLES))
            time.sleep(_SETTLE_S * max(scale, 0.1))
            with processes.CpuTime(app.pid) as used:
                began, before = time.time(), used.seconds()
                time.sleep(seconds)
                ended, spent = time.time(), used.seconds() - before
            kinds = processes.proportional_mb(app.pid)
    bare = _bare_mb(scale)
    commits = [
        commits_between(uri(pipeline.lake_root), began, ended) * 60 / seconds
        for uri in (changelog_uri, points_uri)
    ]
    cpu, memory = spent / (ended - began) * 100, sum(kinds.values())
    return Figure(
        f"idle: {len(_TABLES)} tables without changes, {seconds / 60:g} minutes",
        f"{cpu:.1f} % of a core, {memory:.0f} MB, {sum(commits):.1f} commits a minute",
        f"a stream of PySpark's that does nothing: {sum(bare.values()):.0f} MB",
        f"{memory / sum(bare.values()):.2f}",
        f"< {_LIMIT_CPU:g} %, < {_LIMIT_MB} MB, ≤ {_LIMIT_COMMITS:g} a minute",
        cpu < _LIMIT_CPU and memory < _LIMIT_MB and sum(commits) <= _LIMIT_COMMITS,
        {
            "MB": {kind: round(size) for kind, size in kinds.items()},
            "MB of the stream that does nothing": {kind: round(size) for kind, size in bare.items()},
            "commits a minute: changelog, points": [round(rate, 2) for rate in commits],
        },
    )


def _bare_mb(scale: float) -> dict[str, float]:
    """Return the memory in MB of an idle stream by kind of process.

    It is measured as long after its start as the pipeline, so that Spark has ended unused processes.
    """
    command = [sys.executable, "-m", "benchmarks.bare_stream"]
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[1], stderr=subprocess.DEVNULL, start_new_session=True
    ) as bare:
        try:
            time.sleep((_SETTLE_S + _SECONDS) * max(scale, 0.3))
            return processes.proportional_mb(bare.pid)
        finally:
            os.killpg(bare.pid, signal.SIGKILL)
