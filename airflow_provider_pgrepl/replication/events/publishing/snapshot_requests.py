"""Requests for snapshots of tables, as creek's clients make them: each gets a process of its own."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings

log = logging.getLogger(__name__)

_MOST_WAITING = 16
_LOOK_S, _END_S = 0.5, 10.0


class SnapshotRequests(AbstractContextManager["SnapshotRequests"]):
    """Serves one request after the other while the block runs. `command`: begins a snapshot's process, which
    answers itself; nobody answers a request that cannot be served, as with creek.

    A process of its own, so that reading a large table costs the stream of changes neither time nor memory.
    """

    def __init__(self, command: Sequence[str], settings: PublisherSettings) -> None:
        self._command, self._database = command, settings.database
        self._wanted = TableSelection.parse(settings.tables)
        self._requests: queue.Queue[tuple[TableName, str]] = queue.Queue(_MOST_WAITING)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pgrepl-snapshots", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(2 * _END_S)

    def ask(self, request: bytes, reply_to: str) -> None:
        """Take a request; never waits."""
        table = self._table_of(request)
        if table is None:
            return
        try:
            self._requests.put_nowait((table, reply_to))
        except queue.Full:
            log.warning("a snapshot of %s is not made: %d others are waited for", table, _MOST_WAITING)

    def _table_of(self, request: bytes) -> TableName | None:
        try:
            given = json.loads(request)
            database, schema, name = (given[key] for key in ("database", "namespace", "table"))
            if not all(isinstance(one, str) for one in (database, schema, name)):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            log.warning("a request for a snapshot is none: it names no database, namespace and table")
            return None
        table = TableName(schema, name)
        if database != self._database or not self._wanted.has(-1, {table}):
            log.warning("a snapshot of %s of %s is not made: it is not published", table, one_line(database))
            return None
        return table

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                table, reply_to = self._requests.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            self._run(table, reply_to)

    def _run(self, table: TableName, reply_to: str) -> None:
        try:
            process = subprocess.Popen(
                [*self._command, f"--table={table}", f"--reply-to={reply_to}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except (OSError, ValueError) as error:
            # A name may be one that no argument can be.
            log.error("a snapshot of %s cannot be begun: %s", table, type(error).__name__)
            return
        while process.poll() is None:
            if self._is_over.wait(_LOOK_S):
                process.terminate()
                break
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            log.error("the snapshot of %s failed (exit code %d), and has no end", table, process.returncode)
