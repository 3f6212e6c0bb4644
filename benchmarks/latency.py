"""From COMMIT at the source until the change can be read in the merged tables, under a light steady load."""

from __future__ import annotations

import json
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.points import points_uri
from airflow_provider_pgrepl.replication.lake.table import app_id
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.relation import TableName
from benchmarks import pipelines, running_app, workload
from benchmarks.figure import Figure
from benchmarks.source import Source, running_source

_TABLES = tuple(f"public.bench_{number}" for number in range(1, 6))
_ROWS = 100_000
_TRANSACTIONS_PER_S = 100
_WARM_UP_S, _SECONDS = 20, 60
_P50_LIMIT_S, _P95_LIMIT_S = 2.0, 5.0

_TRANSACTION = " ".join(
    f"insert into {table} values (%(id)s, 1, 'new', 1.5, now());"
    f" update {table} set k = k + 1 where id = %(old)s;"
    for table in _TABLES
)


def run(folder: Path, scale: float) -> Figure:
    """Times of commits are the client's, times of visibility the log files' of the lake tables."""
    with running_source() as source:
        for table in _TABLES:
            workload.create_table(source, table)
            workload.insert(source, 1, _ROWS, table)
        pipeline = pipelines.make_pipeline(folder, "latency", *_TABLES)
        with running_app.replicating(source.dsn, pipeline) as app:
            running_app.wait_applied(app, pipeline, source.end_lsn())
            warm = int(_WARM_UP_S * max(scale, 0.5))
            commits = _commit_steadily(source, warm + int(_SECONDS * scale))
            running_app.wait_applied(app, pipeline, LSN(commits[-1][0]))
    measured = [commit for commit in commits if commit[1] >= commits[0][1] + warm]
    delays = np.max([_delays(measured, _table_history(pipeline, table)) for table in _TABLES], axis=0)
    p50, p95 = np.percentile(delays, [50, 95])
    points = np.percentile(_delays(measured, _point_history(pipeline)), [50, 95])
    return Figure(
        f"commit → visible in the merged tables, {_TRANSACTIONS_PER_S * 10:,} changes/s over five tables",
        f"p50 {p50:.2f} s, p95 {p95:.2f} s",
        "",
        "",
        f"p50 ≤ {_P50_LIMIT_S:g} s, p95 ≤ {_P95_LIMIT_S:g} s",
        bool(p50 <= _P50_LIMIT_S and p95 <= _P95_LIMIT_S),
        {
            "p50, p95, longest s": [round(float(value), 2) for value in (p50, p95, delays.max())],
            "to the consistent point: p50, p95 s": [round(float(value), 2) for value in points],
            "transactions": len(measured),
        },
    )


Commits = Sequence[tuple[int, float]]
"""(an LSN at or before the commit record and after all before it, time when COMMIT returned)"""


def _commit_steadily(source: Source, seconds: int) -> Commits:
    commits = []
    connection = source.connection
    connection.autocommit = False
    started = time.monotonic()
    with connection.cursor() as cursor:
        for number in range(seconds * _TRANSACTIONS_PER_S):
            time.sleep(max(0.0, started + number / _TRANSACTIONS_PER_S - time.monotonic()))
            values = {"id": _ROWS + 1 + number, "old": 1 + number * 7919 % _ROWS}
            cursor.execute(_TRANSACTION + " select pg_current_wal_insert_lsn()", values)
            lsn = LSN.parse(cursor.fetchone()[0])
            connection.commit()
            commits.append((lsn, time.time()))
    connection.autocommit = True
    return commits


def _table_history(pipeline: Pipeline, table: str) -> Commits:
    """(position, time) of each version of a lake table."""
    app = app_id(pipeline.name, Epoch(1))
    return [
        (int(action["txn"]["version"]), file.stat().st_mtime)
        for file, actions in _log(f"{pipeline.lake_root}/{TableName.parse(table).path}")
        for action in actions
        if action.get("txn", {}).get("appId") == app
    ]


def _point_history(pipeline: Pipeline) -> Commits:
    """(LSN, time) of each consistent point; a file that joins several stands for the newest."""
    history = []
    for file, actions in _log(points_uri(pipeline.lake_root)):
        for action in actions:
            if "add" in action:
                path = f"{points_uri(pipeline.lake_root)}/{action['add']['path']}"
                lsns = pq.ParquetFile(path).read(["lsn"])["lsn"].to_pylist()
                history.append((max(lsns), file.stat().st_mtime))
    return history


def _log(uri: str) -> list[tuple[Path, list[dict[str, dict[str, str]]]]]:
    files = sorted(Path(uri, "_delta_log").glob("*.json"))
    return [(file, [json.loads(line) for line in file.read_text().splitlines()]) for file in files]


def _delays(commits: Commits, history: Commits) -> np.ndarray:
    """From each commit to the first version that holds it."""
    positions = [position for position, _ in history]
    return np.array([history[bisect_left(positions, lsn)][1] - at for lsn, at in commits])
