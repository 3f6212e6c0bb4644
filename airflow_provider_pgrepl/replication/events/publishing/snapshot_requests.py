"""Requests for snapshots of tables, as creek's clients make them: each gets a process of its own."""

from __future__ import annotations

import json
import logging
import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.events.creek.subjects import Wire
from airflow_provider_pgrepl.replication.events.table_selection import TableSelection
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings
from airflow_provider_pgrepl.replication.storage import has_delta
from airflow_provider_pgrepl.replication.storage.refusal import delta_errors

log = logging.getLogger(__name__)

_MOST_WAITING = 16
_LOOK_S, _END_S, _MOST_S = 0.5, 10.0, 6 * 3600.0
_LONGEST_NAME, _SAY_EVERY_S = 63, 5.0


class SnapshotRequests(AbstractContextManager["SnapshotRequests"]):
    """Serves one request after the other while the block runs. `command`: begins a snapshot's process.

    A process of its own, so that reading a large table costs the stream of changes neither time nor memory.
    As with creek, who asks is told a subject at once, or is not answered; a snapshot that then fails has no
    end.
    """

    def __init__(self, command: Sequence[str], pipeline: Pipeline, settings: PublisherSettings) -> None:
        self._command, self._lake_root = command, pipeline.lake_root
        self._wire = Wire(settings.namespace, settings.database, settings.wire)
        self._wanted = TableSelection.parse(settings.tables)
        self._accepted: queue.Queue[tuple[TableName, str]] = queue.Queue(_MOST_WAITING)
        self._waiting: dict[TableName, str] = {}
        self._lock, self._said_at = threading.Lock(), -_SAY_EVERY_S
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="pgrepl-snapshots", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join(2 * _END_S)

    def accept(self, request: bytes) -> str | None:
        """The subject to which a snapshot will be sent; None for a request that is not served."""
        table = self._table_of(request)
        if table is None:
            return None
        with self._lock:
            if (waiting := self._waiting.get(table)) is not None:
                # Not begun yet, it has all that one of its own would have.
                return waiting
        why = self._why_not(table)
        subject = self._wire.new_snapshot(str(table), datetime.now(UTC))
        if not why:
            try:
                with self._lock:
                    self._accepted.put_nowait((table, subject))
                    self._waiting[table] = subject
            except queue.Full:
                why = f"{_MOST_WAITING} others are waited for"
        if why:
            self._say(table, why)
            return None
        return subject

    def _say(self, table: TableName, why: str) -> None:
        """Not each time: whoever asks may ask very often."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            log.warning("a snapshot of %s is not made: %s", table, why)

    def _table_of(self, request: bytes) -> TableName | None:
        try:
            given = json.loads(request)
            database, schema, name = (given[key] for key in ("database", "namespace", "table"))
            # No name has half a character, which JSON may have.
            f"{schema}{name}".encode()
            if not all(isinstance(one, str) for one in (database, schema, name)):
                raise TypeError
            if max(map(len, (schema, name))) > _LONGEST_NAME:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            log.debug("a request for a snapshot is none: it names no database, namespace and table")
            return None
        # In the wire's first version databases share the subject.
        return TableName(schema, name) if database == self._wire.database else None

    def _why_not(self, table: TableName) -> str:
        """Empty when it is published, and in the lake."""
        if not self._wanted.has(-1, {table}):
            return "it is not published"
        try:
            with delta_errors("the lake table cannot be looked for"):
                is_there = has_delta(f"{self._lake_root}/{table.path}")
        except PgReplError as error:
            return error.message
        return "" if is_there else "the lake does not hold it"

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                table, subject = self._accepted.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            with self._lock:
                self._waiting.pop(table, None)
            self._run(table, subject)

    def _run(self, table: TableName, subject: str) -> None:
        try:
            process = subprocess.Popen(
                [*self._command, f"--table={table}", f"--subject={subject}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        except OSError as error:
            log.error("a snapshot of %s cannot be begun: %s", table, error.strerror)
            return
        end = time.monotonic() + _MOST_S
        while process.poll() is None:
            if self._is_over.wait(_LOOK_S) or time.monotonic() > end:
                process.terminate()
                break
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if process.returncode:
            log.error("the snapshot of %s failed (exit code %d), and has no end", table, process.returncode)
