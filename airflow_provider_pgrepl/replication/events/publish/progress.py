"""PublisherProgress: what a publisher has done since it began, for its log and for metrics."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_provider_pgrepl.replication.postgres.lsn import LSN


@dataclass
class PublisherProgress:
    """`published`, `resent`, `skipped`, `dropped`: events. `reconnects`: times that the target was lost.
    `published_lsn`: all that committed at or before it is published, but for `stopped` tables."""

    published: int = 0
    resent: int = 0
    skipped: int = 0
    dropped: int = 0
    reconnects: int = 0
    published_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    durable_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    is_connected: bool = False
    stopped: int = 0
