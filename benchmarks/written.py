"""The bytes written to the lake for a byte of change, and the share that remains stored, over ten minutes."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.lake_bytes import WrittenBytes, change_bytes, live_bytes, stored_bytes
from benchmarks.source import running_source
from benchmarks.steady import SteadyLoad, random_updates
from benchmarks.updated_table import TRANSACTIONS_PER_S
from benchmarks.visibility import table_folder
from benchmarks.workload import TABLE

_ROWS = 5_000_000
_MINUTES = 10
_SAMPLES = 20
_LIMIT_WRITTEN, _LIMIT_STORED = 10.0, 3.0


def run(folder: Path, scale: float) -> Figure:
    """Measure ten minutes, in which maintenance deletes few files."""
    return run_for(folder, scale, _MINUTES)


def run_for(folder: Path, scale: float, minutes: float) -> Figure:
    """Measure scattered updates with default settings. Bytes that compaction writes count as well."""
    rows, seconds = int(_ROWS * scale), minutes * 60 * max(scale, 0.05)
    with running_source() as source:
        workload.make_table(source, rows)
        pipeline = pipelines.make_pipeline(folder, "written", TABLE)
        lake_table = table_folder(pipeline, TABLE)
        load = SteadyLoad(source.dsn, TRANSACTIONS_PER_S, random_updates(TABLE, range(1, rows + 1)))
        with running_app.streaming(source, pipeline) as app, WrittenBytes(lake_table) as written:
            began, copied = time.time(), written.total()
            load.start()
            stored = []
            for _ in range(_SAMPLES):
                time.sleep(seconds / _SAMPLES)
                app.check()
                stored.append(stored_bytes(lake_table) / live_bytes(lake_table))
            load.stop()
            running_app.wait_shown(app, pipeline, [TABLE], workload.touch(source, [TABLE]))
            of_changes = change_bytes(pipeline, began, time.time())
            factor = (written.total() - copied) / of_changes
            stored.append(stored_bytes(lake_table) / live_bytes(lake_table))
            live = live_bytes(lake_table)
    return Figure(
        f"bytes written a byte of change: 1,000 updates/s of any of {rows / 1e6:g} M, {seconds / 60:g} min",
        f"{factor:.1f}; stored at the end {stored[-1]:.1f} × live",
        "",
        "",
        f"≤ {_LIMIT_WRITTEN:g}; ≤ {_LIMIT_STORED:g} × live",
        factor <= _LIMIT_WRITTEN and stored[-1] <= _LIMIT_STORED,
        {
            "bytes of changes, live": [of_changes, live],
            "stored / live over the time": [round(share, 1) for share in stored],
        },
    )
