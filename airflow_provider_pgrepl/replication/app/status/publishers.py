"""How a pipeline's publishers of events stand, as they last wrote down."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.events.publish.stopped_table import StoppedTable
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


@dataclass(frozen=True)
class PublisherStatus:
    """A publisher of events, as it last wrote down. All that was committed at or before `position` is
    published, but for `stopped` tables; `lag_bytes` is the source's WAL after it. `error`: what ended it."""

    name: str
    target: str
    position: str | None = None
    lag_bytes: int | None = None
    published: int = 0
    skipped: int = 0
    holder: str = ""
    saved_at: datetime | None = None
    stopped: tuple[StoppedTable, ...] = ()
    error: str = ""
    reason: str = ""
    hint: str = ""


def read_publisher(pipeline: Pipeline, name: str, end: LSN) -> PublisherStatus:
    """Of a publisher of the pipeline file; `end`: of the source's WAL. What cannot be read is its error."""
    target = pipeline.publisher(name).target
    try:
        record = read_record(pipeline.lake_root, name)
    except PgReplError as error:
        kind = type(error).__name__
        return PublisherStatus(name, target, error=kind, reason=error.message, hint=error.hint)
    if record is None:
        return PublisherStatus(name, target)
    return PublisherStatus(
        name,
        target,
        str(record.position),
        max(0, end - record.position.commit_lsn - 1),
        record.published,
        record.skipped,
        record.holder,
        record.saved_at,
        tuple(record.stopped.values()),
        record.error,
        record.reason,
        record.hint,
    )
