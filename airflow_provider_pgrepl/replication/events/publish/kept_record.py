"""KeptRecord: how a publisher stands, and when that is written into its log."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.progress import PublisherProgress
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, PublisherRecord
from airflow_provider_pgrepl.replication.events.publish.stopped_tables import StoppedTables

log = logging.getLogger(__name__)

_SAVE_S, _SAVE_IDLE_S = 1.0, 60.0


class KeptRecord:
    """Of one run. Saving raises FencedError once another publisher has begun, LakeUnavailableError."""

    def __init__(
        self, publisher_log: PublisherLog, record: PublisherRecord, stamp: Callable[[], int]
    ) -> None:
        """`record`: as the log has it; `stamp`: gives that of the target."""
        self._log, self._stamp = publisher_log, stamp
        self.record = replace(record, error="", reason="", hint="")
        self.stopped = StoppedTables(record.stopped)
        self.progress = PublisherProgress(
            published_lsn=record.position.commit_lsn, stopped=len(record.stopped)
        )
        self._is_saved, self._saved_at = True, time.monotonic()

    @property
    def position(self) -> EventPosition:
        return self.record.position

    def advance(self, position: EventPosition) -> None:
        """All up to there is published, but for what stopped."""
        self.record = replace(self.record, position=max(self.position, position))
        self.progress.published_lsn = self.position.commit_lsn

    def add_published(self, count: int) -> None:
        self.progress.published += count
        self.record = replace(self.record, published=self.record.published + count)
        self.need_saving()

    def add_skipped(self, events: Collection[tuple[str, str, str]]) -> None:
        """Events that are passed over, by id, table and reason: written down at once."""
        now = datetime.now(UTC)
        for event, table, reason in events:
            log.warning("skipped %s of %s: %s", event, table, reason)
        rows = [
            {"id": event, "table": table, "reason": reason, "skipped_at": now}
            for event, table, reason in events
        ]
        self._log.add_skipped(rows)
        self.record = replace(self.record, skipped=self.record.skipped + len(events))
        self.progress.skipped += len(events)
        self.need_saving()

    def begin_generation(self) -> int:
        """Whoever has taken this publisher's place makes this fail, before anything is sent.

        By the clock, so that it grows though the record, or the lake, was lost and begun again.
        """
        generation = max(self.record.generation + 1, int(time.time()))
        self.record = replace(self.record, generation=generation)
        self.save()
        return generation

    def note_failure(self, error: PgReplError) -> None:
        """What ended the run."""
        kind = type(error).__name__
        self.record = replace(self.record, error=kind, reason=error.message, hint=error.hint)
        # What ended it is what counts, though it could not be written down.
        with suppress(PgReplError):
            self.save()

    def need_saving(self) -> None:
        """Soon, not with the next sign of life."""
        self._is_saved = False

    def save_when_due(self) -> None:
        waited_s = time.monotonic() - self._saved_at
        if waited_s >= (_SAVE_IDLE_S if self._is_saved else _SAVE_S):
            self.save()

    def save(self) -> None:
        self.record = replace(
            self.record,
            saved_at=datetime.now(UTC),
            stamp=self._stamp(),
            stopped=dict(self.stopped.tables),
        )
        self.progress.stopped = len(self.stopped.tables)
        self._log.save(self.record)
        self._is_saved, self._saved_at = True, time.monotonic()
