"""One very large transaction, from the slot until it is merged: memory, and the time after its commit.

Measured twice: received while it is in progress, and after its commit.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks import pipelines, processes, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.visibility import shown_at
from benchmarks.workload import TABLE

_ROWS = 5_000_000
_WARM_ROWS = 10_000
_LIMIT_MB, _LIMIT_TASK_MB = 300, 1_500
_OF_AFTER = 0.5


@dataclass(frozen=True)
class _Measured:
    grown_mb: float
    idle_mb: float
    task_mb: float
    merged_s: float


def run(folder: Path, scale: float) -> Figure:
    """Measure the growth over idle memory, which is the memory after a few transactions load all code."""
    rows = int(_ROWS * scale)
    after = _measure(folder / "after", rows, in_progress=False)
    early = _measure(folder / "early", rows, in_progress=True)
    grown, task = max(early.grown_mb, after.grown_mb), max(early.task_mb, after.task_mb)
    ratio = early.merged_s / after.merged_s
    return Figure(
        f"one transaction of {rows / 1e6:g} M rows, COMMIT → merged",
        f"{early.merged_s:.1f} s; the receiver's process {grown:.0f} MB above idle ({early.idle_mb:.0f} MB),"
        f" a task of Spark {task:.0f} MB",
        f"received after the commit (`stream_in_progress: false`): {after.merged_s:.1f} s",
        f"{ratio:.2f}",
        f"≤ {_OF_AFTER} × peer, ≤ {_LIMIT_MB} MB above idle, ≤ {_LIMIT_TASK_MB:,} MB",
        ratio <= _OF_AFTER and grown <= _LIMIT_MB and 0 < task <= _LIMIT_TASK_MB,
    )


def _measure(folder: Path, rows: int, *, in_progress: bool) -> _Measured:
    folder.mkdir(parents=True)
    with running_source() as source:
        workload.create_table(source)
        pipeline = pipelines.make_pipeline(folder, "large", TABLE, stream_in_progress=in_progress)
        with running_app.streaming(source, pipeline) as app:
            workload.fill(source, _WARM_ROWS, _WARM_ROWS)
            running_app.wait_shown(app, pipeline, [TABLE], workload.touch(source, [TABLE]))
            idle = processes.resident_mb(app.pid)
            processes.forget_peak(app.pid)
            with processes.TaskPeak(app.pid) as task:
                workload.insert(source, _WARM_ROWS + 1, _WARM_ROWS + rows)
                committed, end = time.time(), workload.touch(source, [TABLE])
                running_app.wait_shown(app, pipeline, [TABLE], end)
            grown = processes.peak_mb(app.pid) - idle
        return _Measured(grown, idle, task.mb, round(shown_at(pipeline, [TABLE], end) - committed, 1))
