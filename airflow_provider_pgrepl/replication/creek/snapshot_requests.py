"""Requests for snapshots of tables, as creek's clients send them, and the queue in which they wait."""

from __future__ import annotations

import json
import logging
import queue
import select
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from typing import Protocol

from airflow_provider_pgrepl.errors import PgReplError, TargetError
from airflow_provider_pgrepl.replication.delta.table import has_delta
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.storage.errors import delta_errors
from airflow_provider_pgrepl.trace import log_unexpected

from .wire import Wire

log = logging.getLogger(__name__)

_MOST_WAITING = 16
_LOOK_S, _END_S = 0.5, 10.0
_LONGEST_NAME, _SAY_EVERY_S = 63, 5.0
_MOST_S = 6 * 3600.0


class Snapshots(Protocol):
    """The producer of snapshots, `at_once` of them at the same time. Called by any thread."""

    at_once: int

    def why_not(self, table: TableName) -> str:
        """Return why no snapshot of the table can be made, as far as this is known in advance; otherwise "".
        Raises PgReplError."""

    def send(self, table: TableName, subject: str, is_over: threading.Event) -> object:
        """Send a snapshot, unless `is_over` is set before. Raises PgReplError; an incomplete snapshot has no
        end."""


class SnapshotRequests(AbstractContextManager["SnapshotRequests"]):
    """A server of requests, which serves them in their order, several at the same time, while the block runs.

    As with creek, the requester gets a subject at once, or no answer. A snapshot that fails later has no end.
    """

    def __init__(self, pipeline: Pipeline, settings: PublisherSettings, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._wire = Wire(settings.namespace, settings.database, settings.wire)
        self._wanted = TableSelection.parse(settings.tables)
        self._accepted: queue.Queue[tuple[TableName, str]] = queue.Queue(_MOST_WAITING)
        self._waiting: dict[TableName, str] = {}
        self._lock, self._said_at = threading.Lock(), -_SAY_EVERY_S
        self._is_over = threading.Event()
        names = [f"pgrepl-snapshots {pipeline.name} {n}" for n in range(snapshots.at_once)]
        self._threads = [threading.Thread(target=self._serve, name=name, daemon=True) for name in names]
        for thread in self._threads:
            thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(2 * _END_S)

    def accept(self, request: bytes) -> str | None:
        """Return the subject to which a snapshot will be sent; None if the request is not served."""
        table = self._table_of(request)
        if table is None:
            return None
        with self._lock:
            if (waiting := self._waiting.get(table)) is not None:
                # A snapshot that has not begun will have all that a new one would have.
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
        """Log the reason, at most once in 5 s: requests may be very frequent."""
        if time.monotonic() - self._said_at >= _SAY_EVERY_S:
            self._said_at = time.monotonic()
            log.warning("a snapshot of %s is not made: %s", table, why)

    def _table_of(self, request: bytes) -> TableName | None:
        try:
            given = json.loads(request)
            database, schema, name = (given[key] for key in ("database", "namespace", "table"))
            # No name in PostgreSQL has half a surrogate pair, which JSON may have.
            f"{schema}{name}".encode()
            if not all(isinstance(one, str) for one in (database, schema, name)):
                raise TypeError
            if max(map(len, (schema, name))) > _LONGEST_NAME:
                raise ValueError
        except (ValueError, KeyError, TypeError, RecursionError):
            log.debug("a request for a snapshot is none: it names no database, namespace and table")
            return None
        # In v1 all databases share the subject of requests.
        return TableName(schema, name) if database == self._wire.database else None

    def _why_not(self, table: TableName) -> str:
        """Return "" if the table is published and can be read; otherwise the reason."""
        if not self._wanted.has(-1, {table}):
            return "it is not published"
        try:
            return self._snapshots.why_not(table)
        except PgReplError as error:
            return error.message

    def _serve(self) -> None:
        while not self._is_over.is_set():
            try:
                table, subject = self._accepted.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            with self._lock:
                self._waiting.pop(table, None)
            try:
                self._snapshots.send(table, subject, self._is_over)
            except PgReplError as error:
                log.error("the snapshot of %s failed, and has no end: %s", table, error)
            except Exception as error:  # noqa: BLE001 - the next is served
                log_unexpected(log, f"the snapshot of {table}, which has no end", error)


class LakeSnapshots:
    """Snapshots of lake tables, made by helper processes, so that reading a large table costs the stream of
    changes neither time nor memory.

    `command` starts a helper. It serves requests until none arrives for a while: starting one takes longer
    than the snapshot of a small table.
    """

    at_once = 2

    def __init__(self, pipeline: Pipeline, command: Sequence[str]) -> None:
        self._lake_root, self._command = pipeline.lake_root, command
        self._waiting: list[_Helper] = []

    def why_not(self, table: TableName) -> str:
        with delta_errors("the lake table cannot be looked for"):
            is_there = has_delta(f"{self._lake_root}/{table.path}")
        return "" if is_there else "the lake does not hold it"

    def send(self, table: TableName, subject: str, is_over: threading.Event) -> None:
        for _ in range(self.at_once + 1):
            helper, code = self._helper(), None
            try:
                code = helper.make(table, subject, is_over)
            finally:
                if code is None:
                    helper.end()
            if code is not None:
                # A list is changed atomically, whichever thread does it.
                self._waiting.append(helper)
                if code:
                    raise TargetError(f"the snapshot process exited with code {code}; its log has the cause")
                return
            if is_over.is_set():
                return
            # The helper had been idle for too long, and exited before it read the request.
        raise TargetError("the snapshot processes exited before they read the request")

    def close(self) -> None:
        """Stop the helpers that wait for requests."""
        while self._waiting:
            self._waiting.pop().end()

    def _helper(self) -> _Helper:
        try:
            return self._waiting.pop()
        except IndexError:
            return _Helper([*self._command, "--requests"])


class _Helper:
    """A process that makes one snapshot after another. Raises TargetError if it cannot be started."""

    def __init__(self, command: Sequence[str]) -> None:
        try:
            # Do not buffer: closing the pipe would write the request again that failed because the process
            # had exited.
            self._process = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
        except OSError as error:
            raise TargetError(
                f"the process that answers snapshot requests cannot be started: {error.strerror}",
                "check that this host has memory and process IDs left",
            ) from None

    def make(self, table: TableName, subject: str, is_over: threading.Event) -> int | None:
        """Return the exit code of the snapshot, or None if it was not made, because the process had exited or
        `is_over` is set. Raises TargetError if the process crashed or took longer than 6 hours."""
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None
        assert answers is not None
        request = json.dumps({"table": str(table), "subject": subject}).encode()
        try:
            requests.write(request + b"\n")
        except BrokenPipeError:
            self._check_end()
            return None
        end = time.monotonic() + _MOST_S
        while not select.select([answers], [], [], _LOOK_S)[0]:
            if is_over.is_set():
                return None
            if time.monotonic() > end:
                raise TargetError(f"the snapshot did not finish within {_MOST_S / 3600:g} hours")
        answer = answers.readline()
        if not answer:
            self._check_end()
            return None
        return int(answer)

    def _check_end(self) -> None:
        if code := self._process.wait():
            raise TargetError(f"the snapshot process exited with code {code}")

    def end(self) -> None:
        with self._process:
            self._process.terminate()
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
