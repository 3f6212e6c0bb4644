"""Records of progress: what the receiver and the applier last said, a row a pipeline."""

from __future__ import annotations

from datetime import datetime

from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors, text_of
from airflow_provider_pgrepl.replication.state.progress import Progress

_WRITE_PROGRESS = """
INSERT INTO _pgrepl.progress AS p (pipeline, received_lsn, durable_lsn, told_lsn, applied_lsn,
    applied_commit_ts, changes_per_s, holder, idle_at)
VALUES (%(pipeline)s,
    coalesce(%(received)s::pg_lsn, '0/0'), coalesce(%(durable)s::pg_lsn, '0/0'),
    coalesce(%(told)s::pg_lsn, '0/0'), coalesce(%(applied)s::pg_lsn, '0/0'),
    %(applied_ts)s::timestamptz, coalesce(%(rate)s::float8, 0), coalesce(%(holder)s::text, ''),
    %(idle)s::timestamptz)
ON CONFLICT (pipeline) DO UPDATE SET
    received_lsn = coalesce(%(received)s::pg_lsn, p.received_lsn),
    durable_lsn = coalesce(%(durable)s::pg_lsn, p.durable_lsn),
    told_lsn = coalesce(%(told)s::pg_lsn, p.told_lsn),
    applied_lsn = coalesce(%(applied)s::pg_lsn, p.applied_lsn),
    applied_commit_ts = coalesce(%(applied_ts)s::timestamptz, p.applied_commit_ts),
    changes_per_s = coalesce(%(rate)s::float8, p.changes_per_s),
    holder = coalesce(%(holder)s::text, p.holder),
    idle_at = coalesce(%(idle)s::timestamptz, p.idle_at),
    updated_at = now()
"""

_PROGRESS = """
SELECT received_lsn::text, durable_lsn::text, told_lsn::text, applied_lsn::text, applied_commit_ts,
    changes_per_s, holder, updated_at, idle_at
FROM _pgrepl.progress WHERE pipeline = %s
"""


class ProgressRecords(StateConnection):
    """The recorded progress of pipelines."""

    def write_progress(
        self,
        pipeline: str,
        *,
        received_lsn: LSN | None = None,
        durable_lsn: LSN | None = None,
        told_lsn: LSN | None = None,
        applied_lsn: LSN | None = None,
        applied_commit_ts: datetime | None = None,
        changes_per_s: float | None = None,
        holder: str | None = None,
        idle_at: datetime | None = None,
    ) -> None:
        """Record what is given and leave the rest: the receiver and the applier each know a part."""
        fields = {
            "pipeline": pipeline,
            "received": text_of(received_lsn),
            "durable": text_of(durable_lsn),
            "told": text_of(told_lsn),
            "applied": text_of(applied_lsn),
            "applied_ts": applied_commit_ts,
            "rate": changes_per_s,
            "holder": holder,
            "idle": idle_at,
        }
        with state_errors("writing progress"), self._connection.cursor() as cursor:
            cursor.execute(_WRITE_PROGRESS, fields)

    def read_progress(self, pipeline: str) -> Progress | None:
        """The last progress written; None when there was none yet."""
        with state_errors("reading progress"):
            found = rows(self._connection, _PROGRESS, (pipeline,))
        if not found:
            return None
        received, durable, told, applied = (LSN.parse(position) for position in found[0][:4])
        return Progress(received, durable, told, applied, *found[0][4:])
