"""Seconds of `pgrepl snapshot` of two small tables, and of `pgrepl replicate` until they are streaming."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from benchmarks import pipelines, processes, workload
from benchmarks.figure import Figure
from benchmarks.source import running_source

_TABLES = ("public.bench_1", "public.bench_2")
_ROWS, _TRIALS = 1_000, 3
_LIMIT_S, _HANGS_S, _POLL_S = 9.0, 300.0, 0.05


def run(folder: Path, scale: float) -> Figure:  # noqa: ARG001 - a start has no scale
    """Measure starts on a host that has started the apps before."""
    with running_source() as source:
        for table in _TABLES:
            workload.make_table(source, _ROWS, table)
        dsn = source.replicator_dsn()
        trials = [_Trial(folder, f"start_{number}", dsn) for number in range(_TRIALS + 1)]
        # The first one loads files into the system's cache.
        found = [(one.snapshot(), *one.replicate()) for one in trials][1:]
    snapshot, live, cpu = (statistics.median(values) for values in zip(*found, strict=True))
    return Figure(
        "start: two tables of 1,000 rows, local[2]",
        f"snapshot {snapshot:.1f} s; replicate, until both are streaming, {live:.1f} s"
        f" ({cpu:.1f} s of CPU time)",
        "–",
        "–",
        f"≤ {_LIMIT_S:g} s each",
        max(snapshot, live) <= _LIMIT_S,
        {"snapshot s, replicate s, CPU s": [[round(value, 2) for value in one] for one in found]},
    )


class _Trial:
    def __init__(self, folder: Path, name: str, dsn: str) -> None:
        self._pipeline: Pipeline = pipelines.make_pipeline(folder, name, *_TABLES)
        self._file = folder / f"{name}.json"
        self._file.write_text(self._pipeline.to_json())
        self._dsn = dsn

    def snapshot(self) -> float:
        """Return the seconds of a snapshot."""
        started = time.perf_counter()
        with self._started("snapshot") as process:
            if process.wait(_HANGS_S):
                raise RuntimeError(f"the snapshot ended with {process.returncode}")
        return time.perf_counter() - started

    def replicate(self) -> tuple[float, float]:
        """Return the seconds until all tables are streaming, and the CPU time until then."""
        started = time.perf_counter()
        with self._started("replicate") as process, processes.CpuTime(process.pid) as used:
            try:
                with closing(StateDatabase(self._dsn, "benchmark")) as state_db:
                    while not self._is_live(state_db):
                        if process.poll() is not None or time.perf_counter() - started > _HANGS_S:
                            raise RuntimeError("the replication app did not become live")
                        time.sleep(_POLL_S)
                return time.perf_counter() - started, used.seconds()
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)

    def _is_live(self, state_db: StateDatabase) -> bool:
        tables = state_db.read_tables(self._pipeline.name).values()
        return all(table.state is TableState.STREAMING for table in tables)

    def _started(self, command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [
                str(Path(sys.executable).with_name("pgrepl")),
                command,
                str(self._file),
                "--",
                "--master",
                "local[2]",
            ],
            env={**os.environ, "PGREPL_DSN": self._dsn},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
