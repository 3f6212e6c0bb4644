"""Reports the progress of copies: in the state database, on a terminal, and in the log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.terminal import find_terminal
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from airflow_provider_pgrepl.replication.state.copy_progress import CopyProgress, CopyRecords
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

SHOW_INTERVAL_S, RECORD_INTERVAL_S, LOG_INTERVAL_S = 1.0, 5.0, 60.0


class TableCopy:
    """The finished ranges of a table that is being copied. Any thread may call it."""

    def __init__(self, ranges: Sequence[CopyRange]) -> None:
        self._ranges = ranges
        self._rows: dict[int, int] = {}
        self._lock = threading.Lock()
        self._began = time.monotonic()
        estimates = [part.rows for part in ranges if part.rows is not None]
        self._expected = sum(estimates) if len(estimates) == len(ranges) else None

    def finish(self, number: int, files: Sequence[Any]) -> None:
        """Count the range with this number as copied into `files`. Can be called again for a range."""
        with self._lock:
            self._rows[number] = sum(file.rows for file in files)

    def progress(self) -> CopyProgress:
        """Return the progress until now. The rate is that of the whole copy."""
        with self._lock:
            rows, finished = sum(self._rows.values()), list(self._rows)
        size = sum(self._ranges[number].bytes for number in finished)
        total = sum(part.bytes for part in self._ranges)
        seconds = max(time.monotonic() - self._began, 0.001)
        rate = round(rows / seconds, 1) if finished else None
        left = round((total - size) * seconds / size, 1) if size else None
        return CopyProgress(rows, self._expected, size, total, rate, left)


class CopyReport:
    """A context manager with a thread that reports on the copies of tables.

    The state database gets one write every RECORD_INTERVAL_S for all tables. A terminal shows a line that is
    rewritten; any other log gets a line a minute. A report that fails does not stop a copy.
    """

    def __init__(self, store: CopyRecords, pipeline: str, tables: int) -> None:
        """:param tables: the number of tables that are to be copied"""
        self._store = store
        self._pipeline = pipeline
        self._tables = tables
        self._copied = 0
        self._copies: dict[TableName, TableCopy] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._terminal = find_terminal()
        self._thread = threading.Thread(target=self._run, name="pgrepl-copies", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()

    @contextmanager
    def copying(self, table: TableName, ranges: Sequence[CopyRange]) -> Iterator[TableCopy]:
        """Report on the copy of a table during the block."""
        copy = TableCopy(ranges)
        with self._lock:
            self._copies[table] = copy
        try:
            yield copy
        except BaseException:
            with self._lock:
                del self._copies[table]
            raise
        with self._lock:
            del self._copies[table]
            self._copied += 1

    def _run(self) -> None:
        try:
            self._report()
        except Exception as error:  # noqa: BLE001 - the copies continue without a report
            log_unexpected(log, "reporting the progress of copies", error)
        finally:
            if self._terminal is not None:
                self._terminal.show("")

    def _report(self) -> None:
        now = time.monotonic()
        record_at, log_at = now + SHOW_INTERVAL_S, now + LOG_INTERVAL_S
        while not self._stopping.wait(SHOW_INTERVAL_S):
            now, copies = time.monotonic(), self._progress()
            if self._terminal is not None:
                self._terminal.show(self._text(copies) if copies else "")
            elif now >= log_at and copies:
                log_at = now + LOG_INTERVAL_S
                log.info("%s", self._text(copies))
            if now >= record_at and copies:
                record_at = now + RECORD_INTERVAL_S
                # The next write suffices. The thread that records results reports a lost connection.
                with suppress(PgReplError):
                    self._store.record_copies(self._pipeline, copies)

    def _progress(self) -> dict[TableName, CopyProgress]:
        with self._lock:
            copies = dict(self._copies)
        return {table: copy.progress() for table, copy in copies.items()}

    def _text(self, copies: dict[TableName, CopyProgress]) -> str:
        done = f"{self._copied} of {self._tables} tables copied"
        return "; ".join([done, *(f"{table}: {one.to_text()}" for table, one in copies.items())])
