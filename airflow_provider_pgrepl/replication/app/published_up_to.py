"""PublishedUpTo: whether a publisher of this process has published all that committed up to an LSN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_provider_pgrepl.replication.events.publish.publisher import Publisher
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord
from airflow_provider_pgrepl.replication.postgres.lsn import LSN

DurableWith = Callable[[LSN], LSN | None]
"""Given an LSN: the changelog's durable LSN once all that committed at or before it is durable; None before,
and where nobody knows. Of an idle source the changelog itself says that late."""


@dataclass(frozen=True)
class PublishedUpTo:
    """Called from any thread: the publisher's record once it has, else None."""

    publisher: Publisher
    durable_with: DurableWith

    def __call__(self, lsn: LSN) -> PublisherRecord | None:
        if has_published(self.publisher.record, LSN(lsn + 1)):
            return self.publisher.record
        durable = self.durable_with(lsn)
        record = self.publisher.record
        return record if durable is not None and has_published(record, durable) else None


def has_published(record: PublisherRecord, durable: LSN) -> bool:
    """Whether all that committed before an LSN is published, but for what stopped."""
    position = record.position
    if position.is_after_transaction:
        return position.commit_lsn >= durable - 1
    return position.commit_lsn >= durable
