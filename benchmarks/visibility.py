"""When a commit at the source can be read in the lake: a steady load, and the times of both sides."""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psycopg2
import pyarrow.parquet as pq

from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.points import points_uri
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.names import TableName

Commits = Sequence[tuple[int, float]]
"""(an LSN at or before the commit record and after all before it, time when COMMIT returned)"""


class SteadyLoad:
    """So many transactions a second; each inserts one row and updates one of ids 1 to `rows` in every table.

    `first_id` is that of the first inserted row, by default the one after `rows`.
    """

    def __init__(
        self, dsn: str, tables: Sequence[str], rows: int, transactions_per_s: int, first_id: int = 0
    ) -> None:
        self._dsn = dsn
        self._rows = rows
        self._first_id = first_id or rows + 1
        self._pause = 1 / transactions_per_s
        self._transaction = " ".join(
            f"insert into {table} values (%(id)s, 1, 'new', 1.5, now());"
            f" update {table} set k = k + 1 where id = %(old)s;"
            for table in tables
        )
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
        connection = psycopg2.connect(self._dsn)
        try:
            with connection.cursor() as cursor:
                self._commit_steadily(connection, cursor)
        except psycopg2.Error as error:
            self._error = error
        finally:
            connection.close()

    def _commit_steadily(
        self, connection: psycopg2.extensions.connection, cursor: psycopg2.extensions.cursor
    ) -> None:
        started, number = time.monotonic(), 0
        while not self._stopping.wait(max(0.0, started + number * self._pause - time.monotonic())):
            values = {"id": self._first_id + number, "old": 1 + number * 7919 % self._rows}
            cursor.execute(self._transaction + " select pg_current_wal_insert_lsn()", values)
            lsn = LSN.parse(cursor.fetchone()[0])
            connection.commit()
            self.commits.append((lsn, time.time()))
            number += 1


def table_history(pipeline: Pipeline, table: str) -> Commits:
    """(position, time) of each version of a lake table."""
    app = app_id(pipeline.name, Epoch(1))
    return [
        (int(action["txn"]["version"]), file.stat().st_mtime)
        for file, actions in _log(f"{pipeline.lake_root}/{TableName.parse(table).path}")
        for action in actions
        if action.get("txn", {}).get("appId") == app
    ]


def point_history(pipeline: Pipeline) -> Commits:
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


def delays(commits: Commits, history: Commits) -> np.ndarray:
    """From each commit to the first version that holds it."""
    positions = [position for position, _ in history]
    return np.array([history[bisect_left(positions, lsn)][1] - at for lsn, at in commits])
