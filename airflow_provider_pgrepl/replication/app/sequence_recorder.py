"""A thread of the replication app that records the values of the source's sequences in the lake.

It reads the values after a consistent point was written, so that they are not before any value that the
transactions up to the point took. Points do not wait for it, and an error stops only the recording.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime

from airflow_provider_pgrepl.errors import PgReplError, SourceConnectionError
from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
from airflow_provider_pgrepl.replication.lake.sequences import (
    Recorded,
    RecordedValue,
    SequenceTable,
    show_unread,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.sequences import (
    SequenceReading,
    SequenceValue,
    read_sequences,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, current_database, row
from airflow_provider_pgrepl.replication.source.server import written_lsn
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""The least seconds between two readings."""
RENEWAL_S = 60.0
"""Seconds after which the values are read without a new point, or unchanged values get the LSN of a newer
one."""
_REST = 20
"""A reading is followed by a pause of this many times its duration, up to RENEWAL_S."""
_PAUSE_S = 10.0
"""Seconds until the next try after an error."""
_LAST_S = 5.0


class SequenceRecorder:
    """Reads the values after each new consistent point, once per second at most, and records changed ones.

    Values that did not change get the LSN of the newest point once a minute, if there is a newer one. A value
    that cannot be read keeps its row, with its LSN. So does a value of an earlier epoch as long as that of
    the source is before it: the source was made from a copy, and its sequence was not set yet.

    :param applied: returns the LSN of the newest point of this run, 0 before the first
    """

    def __init__(
        self,
        dsn: str,
        pipeline: Pipeline,
        state_db: StateDatabase,
        record: EpochRecord,
        applied: Callable[[], LSN],
    ) -> None:
        self._dsn = dsn
        self._pipeline = pipeline
        self._state_db = state_db
        self._record = record
        self._applied = applied
        self._table = SequenceTable(pipeline.lake_root)
        self._connection: Connection | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgrepl-sequences", daemon=True)
        self._read_for = LSN(0)
        self._next = self._next_without_point = 0.0
        self._renews_at = 0.0
        self._problem = ""

    def start(self) -> None:
        """Start the thread. Does nothing if the setting `sequences` is false."""
        if self._pipeline.sequences:
            self._thread.start()

    def stop(self) -> None:
        """Record the values once more if there is a newer point, and end. Waits up to 5 s."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_S)

    def look(self, *, is_last: bool = False) -> None:
        """Read the values, and record them for the newest point. Does nothing before the first point.

        Raises PgReplError.

        :param is_last: also record unchanged values if there is a newer point
        """
        # Take the LSN before the reading: the values are those after it.
        lsn, began = self._applied(), time.monotonic()
        if not lsn:
            return
        source = self._connect()
        if not self._serves(source, lsn):
            return
        reading = self._read(source, is_last=is_last)
        if self._stopping.is_set() and not is_last:
            return  # It is perhaps not complete, and the last reading follows.
        with source_errors("asking for the time"):
            now: datetime = row(source, "SELECT pg_catalog.clock_timestamp()")[0]
        self._record_values(reading, lsn, now, is_last=is_last)
        ended = time.monotonic()
        self._read_for, self._next_without_point = lsn, ended + RENEWAL_S
        self._next = ended + min(RENEWAL_S, max(INTERVAL_S, _REST * (ended - began)))
        self._report(show_unread(reading.unread))

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = connect(self._dsn, f"sequences {self._pipeline.name}", read_only=True)
        return self._connection

    def _serves(self, source: Connection, lsn: LSN) -> bool:
        """Return True if this server serves the slot, and False if the receiver is not connected to it now.

        Raises SourceConnectionError if it does not have the slot, or not the WAL up to the point. Another
        server that the connection string leads to, such as a standby that is behind or a former primary, may
        have values from before the point.
        """
        slot = read_slot(source, self._record.slot)
        is_here = slot is not None and slot.database == current_database(source)
        if not is_here or written_lsn(source) <= lsn:
            raise SourceConnectionError(
                f"the connection leads to a server or database that does not serve slot {self._record.slot}",
                "this is tried again. If it persists, let the connection lead to one server only",
            )
        return slot is not None and slot.active

    def _read(self, source: Connection, *, is_last: bool) -> SequenceReading:
        records = self._state_db.read_tables(self._pipeline.name).items()
        kept = {name: one.relation for name, one in records if one.state is not TableState.REMOVED}
        return read_sequences(
            source,
            [relation.oid for relation in kept.values() if relation is not None],
            list(kept),
            trusts_owners=self._pipeline.trust_table_owners,
            is_stopped=lambda: self._stopping.is_set() and not is_last,
        )

    def _record_values(self, reading: SequenceReading, lsn: LSN, now: datetime, *, is_last: bool) -> None:
        """Replace the recorded values if one has changed, or if it is time to renew their LSN."""
        recorded = self._table.read()
        before = {one.name: one for one in recorded.values}
        rows = merge_values(reading, before, self._record.epoch, lsn, now)
        unread = {name: why for name, why in reading.unread.items() if name not in before}
        is_same = [one.value for one in rows] == [one.value for one in before.values()]
        is_same = is_same and unread == recorded.unread
        may_renew = is_last or time.monotonic() >= self._renews_at
        if is_same and not (may_renew and any(one.point > before[one.name].point for one in rows)):
            return
        self._table.write(Recorded(rows, unread), self._record.epoch, lsn)
        self._renews_at = time.monotonic() + RENEWAL_S

    def _run(self) -> None:
        while not self._stopping.wait(INTERVAL_S):
            now, has_point = time.monotonic(), self._applied() != self._read_for
            if now >= (self._next if has_point else max(self._next, self._next_without_point)):
                self._try()
        self._try(is_last=True)
        self._disconnect()

    def _try(self, *, is_last: bool = False) -> None:
        try:
            self.look(is_last=is_last)
        except Exception as error:  # noqa: BLE001 - an error here must not end the app, nor the thread
            self._next = time.monotonic() + _PAUSE_S
            self._disconnect()
            self._report(str(error) if isinstance(error, PgReplError) else f"unexpected {trace_of(error)}")

    def _report(self, problem: str) -> None:
        """Log a problem unless it is the last one. `problem`: empty if there is none."""
        if problem and problem != self._problem:
            log.warning("values of sequences were not read: %s", problem)
        elif self._problem and not problem:
            log.info("the values of all sequences are read again")
        self._problem = problem

    def _disconnect(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                self._connection.close()
        self._connection = None


def merge_values(
    reading: SequenceReading,
    before: Mapping[TableName, RecordedValue],
    epoch: int,
    lsn: LSN,
    now: datetime,
) -> list[RecordedValue]:
    """Return the rows that follow those `before`, in the order of their names.

    A value that was not read keeps its row. So does one of an earlier epoch that is later than that of the
    source. A sequence that the source no longer has gets no row.
    """

    def is_ahead(was: RecordedValue | None, value: SequenceValue) -> bool:
        return was is not None and was.epoch < epoch and was.value.is_ahead_of(value)

    rows = [
        before[name] if is_ahead(before.get(name), value) else RecordedValue(value, epoch, lsn, now)
        for name, value in reading.values.items()
    ]
    kept = [one for name, one in before.items() if name in reading.unread]
    return sorted([*rows, *kept], key=lambda one: one.name)
