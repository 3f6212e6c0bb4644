"""When a commit at the source can be read in the lake, by the times of the log files there."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from airflow_provider_pgrepl.replication.lake.consistent_points import points_uri
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from benchmarks.store import local_folder

Commits = Sequence[tuple[int, float]]
"""(an LSN at or before the commit record and after all before it, time when COMMIT returned)"""
Actions = list[dict[str, Any]]
"""What one commit of a Delta table says."""


def table_folder(pipeline: Pipeline, table: str) -> Path:
    """Where a lake table lies."""
    return local_folder(pipeline.lake_root) / TableName.parse(table).path


def table_history(pipeline: Pipeline, table: str) -> Commits:
    """(position, time) of each version of a lake table."""
    log = read_log(table_folder(pipeline, table))
    return [(position, at) for at, actions in log for position in _positions(pipeline, actions)]


def table_position(pipeline: Pipeline, table: str) -> LSN:
    """That of the newest version of a lake table that says one; 0 while there is none."""
    for file in reversed(_log_files(table_folder(pipeline, table))):
        for position in _positions(pipeline, _actions(file)):
            return LSN(position)
    return LSN(0)


def point_history(pipeline: Pipeline) -> Commits:
    """(LSN, time) of each consistent point; a file that joins several stands for the newest."""
    history, folder = [], local_folder(points_uri(pipeline.lake_root))
    for at, actions in read_log(folder):
        for action in actions:
            if "add" in action:
                lsns = pq.ParquetFile(folder / action["add"]["path"]).read(["lsn"])["lsn"].to_pylist()
                history.append((max(lsns), at))
    return history


def read_log(folder: str | Path) -> list[tuple[float, Actions]]:
    """The time of each commit of a Delta table, and what it says."""
    return [(file.stat().st_mtime, _actions(file)) for file in _log_files(folder)]


def commits_between(folder: str | Path, begin: float, end: float) -> int:
    """How many commits a Delta table got between two moments."""
    return sum(begin <= file.stat().st_mtime < end for file in _log_files(folder))


def _log_files(folder: str | Path) -> list[Path]:
    return sorted(Path(folder, "_delta_log").glob("*.json"))


def _actions(file: Path) -> Actions:
    return [json.loads(line) for line in file.read_text().splitlines()]


def _positions(pipeline: Pipeline, actions: Actions) -> list[int]:
    app = app_id(pipeline.name, Epoch(1))
    found = (action["txn"] for action in actions if "txn" in action)
    return [int(txn["version"]) for txn in found if txn["appId"] == app]


def delays(commits: Commits, history: Commits) -> np.ndarray:
    """Seconds from each commit to the first version that holds it."""
    positions = [position for position, _ in history]
    return np.array([history[bisect_left(positions, lsn)][1] - at for lsn, at in commits])


def shown_at(pipeline: Pipeline, tables: Sequence[str], lsn: LSN) -> float:
    """The time from which on all of these tables have shown what is before an LSN."""
    return float(slowest_delays([(lsn, 0.0)], pipeline, tables)[0])


def slowest_delays(commits: Commits, pipeline: Pipeline, tables: Sequence[str]) -> np.ndarray:
    """Seconds from each commit until the last of the tables, each of which it changed, shows it."""
    found = [delays(commits, table_history(pipeline, table)) for table in tables]
    return np.asarray(np.max(found, axis=0))
