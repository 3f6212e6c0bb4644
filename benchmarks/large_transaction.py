"""The memory of the app's processes for one very large transaction, from the slot until it is merged."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import pipelines, processes, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source
from benchmarks.visibility import shown_at
from benchmarks.workload import TABLE

_ROWS = 5_000_000
_WARM_ROWS = 10_000
_LIMIT_MB, _LIMIT_TASK_MB = 300, 1_500


def run(folder: Path, scale: float) -> Figure:
    """Measure the growth over idle memory, which is the memory after a few transactions load all code."""
    rows = int(_ROWS * scale)
    with running_source() as source:
        workload.create_table(source)
        pipeline = pipelines.make_pipeline(folder, "large", TABLE)
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
    return Figure(
        f"memory: one transaction of {rows / 1e6:g} M rows, received and merged",
        f"the receiver's process {grown:.0f} MB above idle ({idle:.0f} MB), a task of Spark {task.mb:.0f} MB",
        "",
        "",
        f"≤ {_LIMIT_MB} MB above idle, ≤ {_LIMIT_TASK_MB:,} MB",
        grown <= _LIMIT_MB and 0 < task.mb <= _LIMIT_TASK_MB,
        {"COMMIT → merged s": round(shown_at(pipeline, [TABLE], end) - committed, 1)},
    )
