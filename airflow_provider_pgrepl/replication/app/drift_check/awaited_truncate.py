"""A table whose file, or each file of its partitions, is a new one: truncated as a whole, of which the stream
will tell, or otherwise, of which nothing will."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import timedelta

from airflow_provider_pgrepl.replication.drift.files import new_partitions
from airflow_provider_pgrepl.replication.drift.judge import judge_catalog
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.store import Store

WAIT_S = 75.0
"""A little more than it takes until an idle source's LSN is applied."""

_POLL_S = 0.5
_RUNNING = timedelta(seconds=15)
"""The replication app writes its progress every few seconds."""


def may_be_truncated(recorded: Relation, current: Relation | None, pipeline: Pipeline) -> bool:
    """Whether one transaction gave it new files alone, and nothing else has happened that stops it."""
    if current is None:
        return False
    now = current.files
    before = {oid: file for oid, (file, _) in recorded.files.items()}
    # Of a table that had no partitions only those that came since can tell.
    before = before or {part.oid: part.relfilenode for part in new_partitions(recorded, current)}
    makers = [now[oid][1] for oid, file in before.items() if oid in now and now[oid][0] != file]
    if len(makers) != len(before) or len(set(makers)) != 1:
        return False
    assumed = replace(recorded, truncated_by=makers.pop())
    return judge_catalog(assumed, current, pipeline.choices(recorded.table)).kind is not Kind.UNSAFE


def wait_until_applied(store: Store, pipeline: str, lsn: LSN, timeout_s: float = WAIT_S) -> bool:
    """Whether the lake holds all up to an LSN; waits for it while the replication app is at work."""
    deadline = time.monotonic() + timeout_s
    while True:
        progress = store.read_progress(pipeline)
        if progress is not None and progress.applied_lsn >= lsn:
            return True
        is_running = (
            progress is not None
            and progress.updated_at is not None
            and store.now() - progress.updated_at < _RUNNING
        )
        if not is_running or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
