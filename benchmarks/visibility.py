"""The times at which a lake shows commits of the source, taken from the times of its log files."""

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
"""For each commit: an LSN at or before its record and after all earlier ones, and the time of COMMIT."""
Actions = list[dict[str, Any]]
"""The actions of one commit of a Delta table."""


def table_folder(pipeline: Pipeline, table: str) -> Path:
    """Return the folder of a lake table."""
    return local_folder(pipeline.lake_root) / TableName.parse(table).path


def table_history(pipeline: Pipeline, table: str) -> Commits:
    """Return position and time of each version of a lake table."""
    log = read_log(table_folder(pipeline, table))
    return [(position, at) for at, actions in log for position in _positions(pipeline, actions)]


def table_position(pipeline: Pipeline, table: str) -> LSN:
    """Return the position of the newest version of a lake table that has one, or 0 if there is none."""
    for file in reversed(_log_files(table_folder(pipeline, table))):
        for position in _positions(pipeline, _actions(file)):
            return LSN(position)
    return LSN(0)


def point_history(pipeline: Pipeline) -> Commits:
    """Return LSN and time of each consistent point. For a file with several points, those of the newest."""
    history, folder = [], local_folder(points_uri(pipeline.lake_root))
    for at, actions in read_log(folder):
        for action in actions:
            if "add" in action:
                lsns = pq.ParquetFile(folder / action["add"]["path"]).read(["lsn"])["lsn"].to_pylist()
                history.append((max(lsns), at))
    return history


def read_log(folder: str | Path) -> list[tuple[float, Actions]]:
    """Return the time and the actions of each commit of a Delta table."""
    return [(file.stat().st_mtime, _actions(file)) for file in _log_files(folder)]


def commits_between(folder: str | Path, begin: float, end: float) -> int:
    """Return the number of commits of a Delta table in a period."""
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
    """Return the seconds from each commit to the first version that contains it."""
    positions = [position for position, _ in history]
    return np.array([history[bisect_left(positions, lsn)][1] - at for lsn, at in commits])


def shown_at(pipeline: Pipeline, tables: Sequence[str], lsn: LSN) -> float:
    """Return the time at which the last of these tables first showed the changes before an LSN."""
    return float(slowest_delays([(lsn, 0.0)], pipeline, tables)[0])


def slowest_delays(commits: Commits, pipeline: Pipeline, tables: Sequence[str]) -> np.ndarray:
    """Return the seconds from each commit, which must change all the tables, until the last one shows it."""
    found = [delays(commits, table_history(pipeline, table)) for table in tables]
    return np.asarray(np.max(found, axis=0))
