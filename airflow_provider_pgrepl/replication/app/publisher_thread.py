"""A publisher that runs in a thread of the replication's process."""

from __future__ import annotations

import logging
import threading

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.app import process, publish
from airflow_provider_pgrepl.replication.app.publish import DurableLsnLookup, has_published
from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.trace import log_unexpected

log = logging.getLogger(__name__)

_ENDS_WITHIN_S = process.STOP_LIMIT_S / 2


class _Asked:
    """The request to end that the publisher gets in place of a StopSignal, which works in a main thread
    only."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def ask(self) -> None:
        self._event.set()

    def wait(self, seconds: float) -> bool:
        return self._event.wait(seconds)

    @property
    def is_set(self) -> bool:
        return self._event.is_set()


class PublisherThread:
    """A thread that publishes from `start` to `stop`. Target and salt come from the environment."""

    def __init__(self, pipeline: Pipeline, name: str, durable_with: DurableLsnLookup) -> None:
        self._pipeline, self._name, self._durable_with = pipeline, name, durable_with
        self._asked = _Asked()
        self._publisher: Publisher | None = None
        self._ended = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="pgrepl-publisher", daemon=True)

    def start(self) -> None:
        """Start publishing."""
        self._thread.start()

    def check(self) -> None:
        """Raise the error that ended the thread, unless `stop` was called."""
        if self._ended.is_set() and not self._asked.is_set:
            raise self._error or PgReplError(f"publisher {self._name} has ended by itself")

    def has_published(self, durable: LSN) -> bool:
        """Return True if the target has accepted or rejected everything that committed before `durable`."""
        return self._publisher is not None and has_published(self._publisher.record, durable)

    @property
    def settled(self) -> int:
        """Return the number of changes that the target has accepted or rejected, in this and earlier runs."""
        record = None if self._publisher is None else self._publisher.record
        return record.published + record.skipped if record else 0

    @property
    def stopped_tables(self) -> list[str]:
        """Return the tables that are not published any more, sorted."""
        record = None if self._publisher is None else self._publisher.record
        return sorted(one.table for one in record.stopped.values()) if record else []

    def stop(self) -> None:
        """Ask the thread to end between two batches, and wait for that, up to 50 s.

        Events that were not confirmed are sent again by the next run.
        """
        self._asked.ask()
        self._thread.join(_ENDS_WITHIN_S)

    def _run(self) -> None:
        try:
            publish.publish(
                self._pipeline, self._name, self._asked, durable_with=self._durable_with, begun=self._begun
            )
        except Exception as error:  # noqa: BLE001 - for the thread that supervises to raise
            if not isinstance(error, PgReplError):
                log_unexpected(log, f"publisher {self._name}", error)
            self._error = error
        finally:
            self._ended.set()

    def _begun(self, publisher: Publisher) -> None:
        self._publisher = publisher
