"""Samples of a running replication, which the thread of the progress writer records."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app.status.summary import INTERVAL_S, SourceReading
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.memory import resident_bytes
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.samples import Sample, table_sample_interval_s

log = logging.getLogger(__name__)

_GRACE_S = 15.0
"""Seconds after a minute that a sample waits for the reading of the source, which may take a few seconds."""
_DELETE_INTERVAL_S = 600.0


class SampleWriter:
    """Writes a sample with each reading of the source, which the summary makes once a minute.

    If there is no reading, because the source does not answer, a sample without the source's values is
    written. An error stops nothing: it is logged.
    """

    def __init__(
        self,
        state_db: StateDatabase,
        pipeline: str,
        received: Callable[[], ReceiverProgress],
        applied: Callable[[], ApplierProgress],
        source: Callable[[], SourceReading | None],
    ) -> None:
        self._state_db = state_db
        self._pipeline = pipeline
        self._received = received
        self._applied = applied
        self._source = source
        self._last = self._next_tables = self._next_delete = time.monotonic()
        self._changes, self._bytes = received().changes, received().bytes

    def write_if_due(self) -> None:
        """Write the samples that are due, and delete those that are too old."""
        reading, now = self._source(), time.monotonic()
        if reading is not None and reading.at <= self._last:
            reading = None
        if reading is None and now < self._last + INTERVAL_S + _GRACE_S:
            return
        try:
            self._state_db.write_sample(self._pipeline, self._sample(reading or SourceReading(now), now))
            if now >= self._next_tables:
                count = self._state_db.write_table_samples(self._pipeline, dict(self._applied().positions))
                self._next_tables = now + table_sample_interval_s(count)
            if now >= self._next_delete:
                self._next_delete = now + _DELETE_INTERVAL_S
                self._state_db.delete_old_samples(self._pipeline)
                self._state_db.delete_old_events(self._pipeline)
        except PgReplError as error:
            log.warning("no sample was recorded: %s", error.message)

    def _sample(self, source: SourceReading, now: float) -> Sample:
        received, applied, seconds = self._received(), self._applied(), max(now - self._last, 0.001)
        changes, size = received.changes - self._changes, received.bytes - self._bytes
        self._last, self._changes, self._bytes = now, received.changes, received.bytes
        return Sample(
            received_lsn=_known(received.received_lsn),
            durable_lsn=_known(received.durable_lsn),
            confirmed_lsn=_known(received.confirmed_lsn),
            applied_lsn=_known(applied.applied_lsn),
            wal_lsn=source.wal_lsn,
            lag_seconds=source.lag_seconds,
            lag_bytes=source.lag_bytes,
            # A new receiver, after a lost connection, may begin to count again.
            changes_per_s=max(0, changes) / seconds,
            bytes_per_s=max(0, size) / seconds,
            wal_retained_bytes=source.wal_retained_bytes,
            wal_limit_bytes=source.wal_limit_bytes,
            slot_active=source.slot_active,
            memory_bytes=resident_bytes(),
        )


def _known(lsn: LSN) -> LSN | None:
    return lsn or None
