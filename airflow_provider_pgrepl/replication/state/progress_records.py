"""Records of progress: what the receiver and the applier last said, a row a pipeline."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import rows
from airflow_provider_pgrepl.replication.state.connection import StateConnection, state_errors, text_of
from airflow_provider_pgrepl.replication.state.progress import Progress, TableBytes, TableMerges

_WRITE_PROGRESS = """
INSERT INTO _pgrepl.progress AS p (pipeline, received_lsn, durable_lsn, confirmed_lsn, applied_lsn,
    applied_commit_ts, changes_per_s, holder, idle_at, table_bytes,
    table_merges)
VALUES (%(pipeline)s,
    coalesce(%(received)s::pg_lsn, '0/0'), coalesce(%(durable)s::pg_lsn, '0/0'),
    coalesce(%(confirmed)s::pg_lsn, '0/0'), coalesce(%(applied)s::pg_lsn, '0/0'),
    %(applied_ts)s::timestamptz, coalesce(%(rate)s::float8, 0), coalesce(%(holder)s::text, ''),
    %(idle)s::timestamptz, coalesce(%(bytes)s::jsonb, '{}'), coalesce(%(merges)s::jsonb, '{}'))
ON CONFLICT (pipeline) DO UPDATE SET
    received_lsn = coalesce(%(received)s::pg_lsn, p.received_lsn),
    durable_lsn = coalesce(%(durable)s::pg_lsn, p.durable_lsn),
    confirmed_lsn = coalesce(%(confirmed)s::pg_lsn, p.confirmed_lsn),
    applied_lsn = coalesce(%(applied)s::pg_lsn, p.applied_lsn),
    applied_commit_ts = coalesce(%(applied_ts)s::timestamptz, p.applied_commit_ts),
    changes_per_s = coalesce(%(rate)s::float8, p.changes_per_s),
    holder = coalesce(%(holder)s::text, p.holder),
    idle_at = coalesce(%(idle)s::timestamptz, p.idle_at),
    table_bytes = coalesce(%(bytes)s::jsonb, p.table_bytes),
    table_merges = coalesce(%(merges)s::jsonb, p.table_merges),
    updated_at = now()
"""

_PROGRESS = """
SELECT received_lsn::text, durable_lsn::text, confirmed_lsn::text, applied_lsn::text, applied_commit_ts,
    changes_per_s, holder, updated_at, idle_at, table_bytes, table_merges
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
        confirmed_lsn: LSN | None = None,
        applied_lsn: LSN | None = None,
        applied_commit_ts: datetime | None = None,
        changes_per_s: float | None = None,
        holder: str | None = None,
        idle_at: datetime | None = None,
        table_bytes: Mapping[str, TableBytes] | None = None,
        table_merges: Mapping[str, TableMerges] | None = None,
    ) -> None:
        """Record what is given and leave the rest: the receiver and the applier each know a part."""
        fields = {
            "pipeline": pipeline,
            "received": text_of(received_lsn),
            "durable": text_of(durable_lsn),
            "confirmed": text_of(confirmed_lsn),
            "applied": text_of(applied_lsn),
            "applied_ts": applied_commit_ts,
            "rate": changes_per_s,
            "holder": holder,
            "idle": idle_at,
            "bytes": None if table_bytes is None else _by_table(table_bytes),
            "merges": None if table_merges is None else _by_table(table_merges),
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
        commit_ts, rate, holder, updated_at, idle_at, table_bytes, table_merges = found[0][4:]
        measured = {path: TableBytes(**fields) for path, fields in table_bytes.items()}
        merges = {path: TableMerges(**fields) for path, fields in table_merges.items()}
        return Progress(
            received, durable, told, applied, commit_ts, rate, holder, updated_at, idle_at, measured, merges
        )


def _by_table(measured: Mapping[str, TableBytes] | Mapping[str, TableMerges]) -> str:
    return json.dumps({path: asdict(one) for path, one in measured.items()})
