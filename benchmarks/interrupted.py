"""The time of a snapshot that is killed at 10, 50 and 90 %, and continued. The peer is one that is not."""

from __future__ import annotations

import os
import shutil
import signal
import statistics
import subprocess
import sys
from pathlib import Path

from airflow_provider_pgrepl.replication.runtime.spark_submit import small_jvm, spark_submit
from benchmarks import pipelines
from benchmarks.figure import Figure
from benchmarks.snapshot import CREATE, FILL, TABLE
from benchmarks.source import Source, running_source
from benchmarks.store import local_folder

_HERE = Path(__file__).parent
_ROWS = 20_000_000
_SHARES = (0.1, 0.5, 0.9)
_WHOLE = 2.0
_REPEAT = 3
_RANGE_BYTES = 32 << 20
_LIMIT = 1.2


def run(folder: Path, scale: float) -> Figure:
    """Measure both in turns. Starts of the app, and of Spark with its Python workers, are not counted."""
    rows = int(_ROWS * scale)
    ours, wholes = [], []
    with running_source() as source:
        source.execute(CREATE)
        source.execute(FILL.format(1, rows))
        source.settle()
        dsn = source.replicator_dsn()
        for number in range(_REPEAT + 1):
            wholes.append(_copy(source, dsn, folder, f"whole_{number}", ()))
            ours.append(_copy(source, dsn, folder, f"killed_{number}", _SHARES))
    # The first ones read the table into the system's cache.
    ours, wholes = ours[1:], wholes[1:]
    together = statistics.median(sum(parts) for parts in ours)
    whole = statistics.median(sum(parts) for parts in wholes)
    return Figure(
        f"snapshot killed at 10, 50 and 90 % of {rows / 1e6:g} M rows × 8 columns, all four runs",
        f"{together:.1f} s",
        f"not killed: {whole:.1f} s",
        f"{together / whole:.2f}",
        f"≤ {_LIMIT} × not killed",
        together <= _LIMIT * whole,
        {"killed s": ours, "not killed s": [parts[0] for parts in wholes]},
    )


def _copy(source: Source, dsn: str, folder: Path, name: str, shares: tuple[float, ...]) -> list[float]:
    """Copy the table into a lake named `name`, and return the seconds of each run; delete the lake."""
    pipeline = pipelines.make_pipeline(folder, name, TABLE, snapshot_range_bytes=_RANGE_BYTES)
    file, seconds, app = folder / f"{name}.json", folder / f"{name}.seconds", _HERE / "interrupted_app.py"
    file.write_text(pipeline.to_json())
    python = dict.fromkeys(("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"), sys.executable)
    found = []
    for share in (*shares, _WHOLE):
        process = subprocess.run(
            [spark_submit(), str(app), str(share), str(seconds), "--pipeline", str(file)],
            env={**os.environ, "PGREPL_DSN": dsn, **python, **small_jvm(os.environ)},
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )
        if process.returncode != (0 if share == _WHOLE else -signal.SIGKILL):
            raise RuntimeError(f"the app ended with {process.returncode}:\n{process.stderr[-3000:]}")
        found.append(float(seconds.read_text()))
        seconds.unlink()
    source.execute("select pg_drop_replication_slot(%s)", pipeline.slot)
    shutil.rmtree(local_folder(pipeline.lake_root))
    return found
