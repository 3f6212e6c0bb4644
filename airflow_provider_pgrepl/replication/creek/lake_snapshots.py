"""LakeSnapshots: snapshots of tables from the lake, each by a process of its own."""

from __future__ import annotations

import logging
import subprocess
import threading
import time
from collections.abc import Sequence

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.storage.refusal import delta_errors

log = logging.getLogger(__name__)

_LOOK_S, _END_S, _MOST_S = 0.5, 10.0, 6 * 3600.0


class LakeSnapshots:
    """`command`: begins a snapshot's process. Reading a large table then costs the stream of changes neither
    time nor memory."""

    at_once = 1

    def __init__(self, pipeline: Pipeline, command: Sequence[str]) -> None:
        self._lake_root, self._command = pipeline.lake_root, command

    def why_not(self, table: TableName) -> str:
        with delta_errors("the lake table cannot be looked for"):
            is_there = has_delta(f"{self._lake_root}/{table.path}")
        return "" if is_there else "the lake does not hold it"

    def send(self, table: TableName, subject: str, is_over: threading.Event) -> None:
        try:
            process = subprocess.Popen(
                [*self._command, f"--table={table}", f"--subject={subject}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            raise TargetError(f"its process cannot be begun: {error.strerror}") from None
        end = time.monotonic() + _MOST_S
        while process.poll() is None:
            if is_over.wait(_LOOK_S) or time.monotonic() > end:
                process.terminate()
                break
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            log.error("the snapshot of %s failed (exit code %d), and has no end", table, process.returncode)
