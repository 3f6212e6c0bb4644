"""The counters of a publisher since it began, for its log and for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_pgrepl.replication.postgres.lsn import LSN


@dataclass
class PublisherProgress:
    """The progress of a publisher.

    `published`, `resent`, `skipped`, `dropped`: numbers of events. `reconnects`: how often the connection to
    the target was lost. `published_lsn`: everything that committed at or before it is published, except for
    `stopped` tables.
    """

    published: int = 0
    resent: int = 0
    skipped: int = 0
    dropped: int = 0
    reconnects: int = 0
    published_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    durable_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    is_connected: bool = False
    stopped: int = 0
