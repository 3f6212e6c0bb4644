"""A thousand updates a second of any rows of one table: how late, how many bytes, how much work, by size.

The same small load on tables of all sizes: what a change costs must follow the change.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psycopg2

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.names import TableName
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import Source, running_source
from benchmarks.visibility import Commits, delays, table_history

MILLION = 1_000_000
SIZES = {0.1: 3.0, 1: 3.0, 5: 5.0, 20: 8.0, 50: 15.0}
"""Millions of rows, and within how many seconds 95 of 100 updates are to be seen."""
_TRANSACTIONS_PER_S, _ROWS_A_TRANSACTION = 100, 10
_WARM_UP_S, _SECONDS = 20, 60
_ROWS_AT_ONCE = 500_000
_LIMIT_GROWTH = 4.0


@dataclass(frozen=True)
class Measured:
    """Of one size: seconds until updates are seen, and per update the lake's bytes and the app's CPU time."""

    millions: float
    p50_s: float
    p95_s: float
    bytes_per_change: float
    cpu_us_per_change: float

    def __str__(self) -> str:
        return (
            f"{self.millions:g} M rows: p50 {self.p50_s:.1f} s, p95 {self.p95_s:.1f} s,"
            f" {self.bytes_per_change:,.0f} bytes and {self.cpu_us_per_change:,.0f} µs of CPU a change"
        )


class ScatteredUpdates:
    """So many transactions a second, each of which updates rows of any ids."""

    def __init__(self, dsn: str, table: str, rows: int) -> None:
        self._dsn, self._table, self._rows = dsn, table, rows
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._error: Exception | None = None
        self.commits: list[tuple[int, float]] = []

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> Commits:
        """End after the transaction that runs; raises what ended it before."""
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self.commits

    def _run(self) -> None:
        try:
            self._commit_steadily()
        except psycopg2.Error as error:
            self._error = error

    def _commit_steadily(self) -> None:
        connection = psycopg2.connect(self._dsn)
        chance, cursor = random.Random(1), connection.cursor()  # noqa: S311 - ids of a load
        sql = (
            f"update {self._table} set k = k + 1, v = 'changed ' || id where id = any(%s);"
            " select pg_current_wal_insert_lsn()"
        )
        started, number = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, started + number / _TRANSACTIONS_PER_S - time.monotonic())):
            ids = sorted(chance.sample(range(1, self._rows + 1), _ROWS_A_TRANSACTION))
            cursor.execute(sql, (ids,))
            lsn = LSN.parse(cursor.fetchone()[0])
            connection.commit()
            self.commits.append((lsn, time.time()))
            number += 1
        connection.close()


def run(folder: Path, scale: float) -> Figure:
    """All sizes, each in a database and a pipeline of its own."""
    sizes = [size for size in SIZES if size <= max(SIZES) * scale]
    found = [measure(folder / f"{size:g}", size, scale) for size in sizes]
    by_size = {one.millions: one for one in found}
    base, largest = by_size.get(1, found[0]), found[-1]
    growth = max(
        largest.bytes_per_change / base.bytes_per_change,
        largest.cpu_us_per_change / base.cpu_us_per_change,
    )
    late = [one.millions for one in found if one.p95_s > SIZES[one.millions]]
    numbers: dict[str, Any] = {f"{one.millions:g} M rows": str(one) for one in found}
    return Figure(
        f"1,000 updates/s of any rows, one table of {found[0].millions:g} to {largest.millions:g} M rows",
        "p95 " + ", ".join(f"{one.p95_s:.1f}" for one in found) + " s",
        "",
        f"{growth:.1f}",
        f"p95 ≤ {', '.join(f'{SIZES[size]:g}' for size in sizes)} s; cost grows ≤ {_LIMIT_GROWTH:g} ×",
        not late and growth <= _LIMIT_GROWTH,
        numbers,
    )


def measure(folder: Path, millions: float, scale: float = 1.0, **options: Any) -> Measured:
    """One size: the table filled and copied, and then a minute of updates."""
    folder.mkdir(parents=True)
    rows = int(millions * MILLION)
    with running_source() as source:
        fill(source, rows)
        pipeline = pipelines.make_pipeline(folder, "scattered", workload.TABLE, **options)
        with running_app.replicating(source.replicator_dsn(), pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn(), 600)
            load = ScatteredUpdates(source.dsn, workload.TABLE, rows)
            load.start()
            time.sleep(_WARM_UP_S)
            before = _lake_bytes(pipeline), _cpu_s(app.pid), len(load.commits)
            time.sleep(_SECONDS * min(1.0, max(scale, 0.2)))
            after = _lake_bytes(pipeline), _cpu_s(app.pid), len(load.commits)
            commits = load.stop()
            running_app.wait_applied(app, pipeline, LSN(commits[-1][0]), 600)
    seen = delays(commits[before[2] :], table_history(pipeline, workload.TABLE))
    p50, p95 = np.percentile(seen, [50, 95])
    written, cpu, transactions = (now - then for now, then in zip(after, before, strict=True))
    changes = transactions * _ROWS_A_TRANSACTION
    return Measured(millions, float(p50), float(p95), written / changes, cpu * 1e6 / changes)


def fill(source: Source, rows: int) -> None:
    """The table, with its ids from 1 on."""
    workload.create_table(source)
    source.execute("set synchronous_commit = off")
    for first in range(1, rows + 1, _ROWS_AT_ONCE):
        workload.insert(source, first, min(rows, first + _ROWS_AT_ONCE - 1))
    source.execute(f"vacuum analyze {workload.TABLE}")


def _lake_bytes(pipeline: Pipeline) -> int:
    """What lies in the table's folder; nothing is taken away while a measurement runs."""
    folder = Path(pipeline.lake_root) / TableName.parse(workload.TABLE).path
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def _cpu_s(session: int) -> float:
    """CPU seconds of all processes of an app: it has a session of its own."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
