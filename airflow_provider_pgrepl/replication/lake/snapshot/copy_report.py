"""The progress of the copies of tables, reported in the state database, on a terminal, and in the log."""

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
from airflow_provider_pgrepl.replication.state.reports import CopyProgress, CopyRecords
from airflow_provider_pgrepl.trace import log_unexpected

from .kept_ranges import KeptRanges

log = logging.getLogger(__name__)

SHOW_INTERVAL_S, RECORD_INTERVAL_S, LOG_INTERVAL_S = 1.0, 5.0, 60.0
_TICK_S = 0.25
_LOST_SHARE = 0.01
"""The share of a copy's time after which finished ranges are recorded again: a kill loses no more of them."""


class TableCopy:
    """The finished ranges of a table that is being copied. Any thread may call it."""

    def __init__(self, ranges: Sequence[CopyRange], kept: KeptRanges | None = None) -> None:
        self._ranges = ranges
        self._kept = kept
        self._rows: dict[int, int] = {}
        self._unchanged = set[int]()
        self._lock = threading.Lock()
        self._began = self._recorded = time.monotonic()
        estimates = [part.rows for part in ranges if part.rows is not None]
        self._expected = sum(estimates) if len(estimates) == len(ranges) else None

    def finish(self, number: int, files: Sequence[Any] | None) -> None:
        """Count the range with this number as copied into `files`; None: as kept from an earlier copy. Can
        be called again for a range."""
        part = self._ranges[number]
        if files is None:
            assert part.copied is not None
            with self._lock:
                self._rows[number] = part.copied.rows
                self._unchanged.add(number)
            return
        if self._kept is not None:
            self._kept.add(part, files)
        with self._lock:
            self._rows[number] = sum(file.rows for file in files)

    def count(self, number: int, rows: int, *, is_kept: bool) -> None:
        """Count the range with this number as read, for a comparison. Its first count stays. `is_kept`: an
        earlier comparison has read it."""
        with self._lock:
            if number not in self._rows and is_kept:
                self._unchanged.add(number)
            self._rows.setdefault(number, rows)

    def record_if_due(self) -> None:
        """Record the finished ranges for a later copy. Raises LakeUnavailableError, LakeError."""
        now = time.monotonic()
        if self._kept is not None and now - self._recorded >= _LOST_SHARE * (now - self._began):
            self._recorded = now
            self._kept.record()

    @property
    def unchanged(self) -> int:
        """The number of ranges that are kept from an earlier copy or comparison."""
        with self._lock:
            return len(self._unchanged)

    def progress(self) -> CopyProgress:
        """Return the progress until now. The rate is that of the whole copy, without kept ranges."""
        with self._lock:
            rows, unchanged = dict(self._rows), set(self._unchanged)
        size = sum(self._ranges[number].bytes for number in rows)
        total = sum(part.bytes for part in self._ranges)
        seconds = max(time.monotonic() - self._began, 0.001)
        copied = rows.keys() - unchanged
        copied_bytes = sum(self._ranges[number].bytes for number in copied)
        rate = round(sum(rows[number] for number in copied) / seconds, 1) if copied else None
        left = round((total - size) * seconds / copied_bytes, 1) if copied_bytes else None
        return CopyProgress(sum(rows.values()), self._expected, size, total, rate, left)


class CopyReport:
    """A context manager with a thread that reports on the copies of tables.

    The state database gets one write every RECORD_INTERVAL_S for all tables. Finished ranges are recorded in
    the lake much sooner. A terminal shows a line that is
    rewritten; any other log gets a line a minute. A report that fails does not stop a copy.
    """

    def __init__(self, store: CopyRecords | None, pipeline: str, tables: int) -> None:
        """:param store: None to report on the terminal and in the log only
        :param tables: the number of tables that are to be copied or compared
        """
        self._store = store
        self._pipeline = pipeline
        self._tables = tables
        self._done = set[TableName]()
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
    def copying(
        self, table: TableName, ranges: Sequence[CopyRange], kept: KeptRanges | None = None
    ) -> Iterator[TableCopy]:
        """Report on the copy or comparison of a table during the block, and record its ranges in `kept`."""
        copy = TableCopy(ranges, kept)
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
            self._done.add(table)

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
        show_at, record_at, log_at = now + SHOW_INTERVAL_S, now + SHOW_INTERVAL_S, now + LOG_INTERVAL_S
        while not self._stopping.wait(_TICK_S):
            self._record_ranges()
            if (now := time.monotonic()) < show_at:
                continue
            show_at, copies = now + SHOW_INTERVAL_S, self._progress()
            if self._terminal is not None:
                self._terminal.show(self._text(copies) if copies else "")
            elif now >= log_at and copies:
                log_at = now + LOG_INTERVAL_S
                log.info("%s", self._text(copies))
            if now >= record_at and copies and self._store is not None:
                record_at = now + RECORD_INTERVAL_S
                # The next write suffices. The thread that records results reports a lost connection.
                with suppress(PgReplError):
                    self._store.record_copies(self._pipeline, copies)

    def _record_ranges(self) -> None:
        with self._lock:
            copies = list(self._copies.values())
        for copy in copies:
            with suppress(PgReplError):
                copy.record_if_due()

    def _progress(self) -> dict[TableName, CopyProgress]:
        with self._lock:
            copies = dict(self._copies)
        return {table: copy.progress() for table, copy in copies.items()}

    def _text(self, copies: dict[TableName, CopyProgress]) -> str:
        done = f"{len(self._done)} of {self._tables} tables done"
        return "; ".join([done, *(f"{table}: {one.to_text()}" for table, one in copies.items())])
