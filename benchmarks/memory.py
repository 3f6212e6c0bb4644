"""The memory of the receiver above its idle size for one very large transaction.

The receiver runs in this process, so nothing else in it may grow.
"""

from __future__ import annotations

import re
from pathlib import Path

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from benchmarks import pipelines, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source

_ROWS = 2_000_000
_LIMIT_MB = 300


def run(folder: Path, scale: float) -> Figure:
    """Measure the growth over idle memory, which is the memory after a few transactions load all code."""
    rows = int(_ROWS * scale)
    with running_source() as source:
        workload.create_table(source)
        pipeline = pipelines.make_pipeline(folder, "memory", workload.TABLE)
        pipelines.publish(source.dsn, pipeline)
        (point,) = source.fetch(
            "select lsn from pg_create_logical_replication_slot(%s, 'pgoutput')", pipeline.slot
        )
        pipelines.begin_changelog(source.dsn, pipeline, LSN.parse(point))
        with pipelines.receiving(source.dsn, pipeline) as receiver:
            workload.fill(source, 10_000, 0)
            pipelines.wait_received(receiver, source.end_lsn())
            idle = _resident_mb("VmRSS")
            Path("/proc/self/clear_refs").write_text("5")  # reset the peak
            workload.insert(source, 10_001, 10_000 + rows)
            pipelines.wait_received(receiver, source.end_lsn(), 600)
            grown = _resident_mb("VmHWM") - idle
    return Figure(
        f"memory: the receiver, one transaction of {rows / 1e6:g} M rows",
        f"{grown:.0f} MB above idle ({idle:.0f} MB)",
        "",
        "",
        f"≤ {_LIMIT_MB} MB above idle",
        grown <= _LIMIT_MB,
        {"idle MB": round(idle), "above idle MB": round(grown)},
    )


def _resident_mb(field: str) -> float:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e6
