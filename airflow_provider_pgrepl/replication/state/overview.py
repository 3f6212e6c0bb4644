"""All pipelines of a state database at a glance, and the tables of one, for pages that people look at.

Each question is a few statements for all pipelines or tables, whose work is bounded by the retention of
samples. Records are read without their relations and pipeline files, which take longest to read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import psycopg2.errors
import psycopg2.extensions

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import LimitedConnection, rows

from . import schema
from .connection import older_schema, state_errors
from .recorded_events import EventRecords, RunEvent
from .reports import REPORTS, CopyProgress, PublisherReport, publisher_report, read_copy_progress
from .samples import SampleRecords

_PIPELINES = """
SELECT p.name, pg_catalog.concat_ws('/', p.id, d.oid, pg_catalog.pg_postmaster_start_time()), p.slot,
    p.lake, now(), progress.applied_lsn::text, progress.changes_per_s,
    progress.holder, progress.updated_at, run.kind, run.time, run.actor, run.error, run.reason, run.hint,
    sample.time, sample.lag_seconds, sample.lag_bytes, sample.bytes_per_s, sample.wal_retained_bytes,
    sample.wal_limit_bytes, sample.slot_active
FROM _pgrepl.pipelines p JOIN pg_catalog.pg_database d ON d.datname = pg_catalog.current_database()
    LEFT JOIN _pgrepl.progress ON progress.pipeline = p.name
    LEFT JOIN LATERAL (SELECT * FROM _pgrepl.events e
        WHERE e.pipeline = p.name AND e.schema_name IS NULL AND e.table_name IS NULL
            AND e.kind IN ('started', 'stopped', 'failed')
        ORDER BY e.id DESC LIMIT 1) AS run ON true
    LEFT JOIN LATERAL (SELECT * FROM _pgrepl.samples s WHERE s.pipeline = p.name
        ORDER BY s.time DESC LIMIT 1) AS sample ON true
ORDER BY p.name
"""
_STATES = "SELECT pipeline, state, count(*) FROM _pgrepl.tables GROUP BY pipeline, state"
_ERRORED = """
SELECT DISTINCT ON (pipeline) pipeline, schema_name, table_name, since, error, reason, hint
FROM _pgrepl.tables WHERE state = 'errored' ORDER BY pipeline, since DESC
"""
_LAGS = """
SELECT p.name, lag.step, lag.seconds FROM _pgrepl.pipelines p CROSS JOIN LATERAL (
    SELECT pg_catalog.date_bin('15 minutes', s.time, '2000-01-01') AS step, max(s.lag_seconds) AS seconds
    FROM _pgrepl.samples s WHERE s.pipeline = p.name AND s.time > now() - interval '1 day' GROUP BY 1
) AS lag ORDER BY 1, 2
"""
_TABLES = """
SELECT schema_name, table_name, state, since, membership, rows_copied, snapshot_at, error, reason, hint,
    lsn::text, remedy, verified_through::text, verified_at, copying
FROM _pgrepl.tables WHERE pipeline = %(pipeline)s ORDER BY schema_name, table_name
"""
_MEASURED = "SELECT table_bytes, table_merges FROM _pgrepl.progress WHERE pipeline = %(pipeline)s"
# Both samples are the first rows of scans of table_samples_of_table, unless the table has not moved.
_MOVED = """
SELECT t.schema_name, t.table_name, earlier.time
FROM _pgrepl.tables t
    CROSS JOIN LATERAL (SELECT s.position_lsn FROM _pgrepl.table_samples s
        WHERE (s.pipeline, s.schema_name, s.table_name) = (t.pipeline, t.schema_name, t.table_name)
        ORDER BY s.time DESC LIMIT 1) AS newest
    CROSS JOIN LATERAL (SELECT s.time FROM _pgrepl.table_samples s
        WHERE (s.pipeline, s.schema_name, s.table_name) = (t.pipeline, t.schema_name, t.table_name)
            AND s.time > now() - interval '1 day' AND s.position_lsn <> newest.position_lsn
        ORDER BY s.time DESC LIMIT 1) AS earlier
WHERE t.pipeline = %(pipeline)s
"""
_COUNT = "SELECT count(*) FROM _pgrepl.tables WHERE pipeline = %(pipeline)s AND state <> 'removed'"
_RELATION = """
SELECT relation FROM _pgrepl.tables
WHERE pipeline = %(pipeline)s AND schema_name = %(schema)s AND table_name = %(table)s
"""
LAG_STEP = timedelta(minutes=15)
"""The time of one value of `PipelineRow.lags`."""


@dataclass(frozen=True)
class ErroredTable:
    """The table of a pipeline that was errored last."""

    table: TableName
    since: datetime
    error: str
    reason: str
    hint: str


@dataclass(frozen=True)
class LastSample:
    """The values of a pipeline's newest sample; None for those that were not known."""

    time: datetime
    lag_seconds: float | None = None
    lag_bytes: int | None = None
    bytes_per_s: float | None = None
    wal_retained_bytes: int | None = None
    wal_limit_bytes: int | None = None
    slot_active: bool | None = None


@dataclass(frozen=True)
class PipelineRow:
    """A pipeline as its state database shows it at the time `now`.

    `id`: the same through each connection to the database. A copy of the database has the same record, so the
    ID includes the database's oid and the start of its server.
    `states`: number of tables by state. `reported_at`: the last report of progress. `lags`: the largest lag
    in seconds of each LAG_STEP of the last day that has a sample, with the begin of the step.
    """

    name: str
    id: str
    slot: str
    lake: str
    now: datetime
    applied_lsn: str | None = None
    changes_per_s: float | None = None
    holder: str = ""
    reported_at: datetime | None = None
    run: RunEvent | None = None
    sample: LastSample | None = None
    states: Mapping[str, int] = field(default_factory=dict)
    errored: ErroredTable | None = None
    lags: Sequence[tuple[datetime, float | None]] = ()


@dataclass(frozen=True)
class TableRow:
    """A table without its relation. `moved_at`: the time of the last sample with another position, None if
    there is none of the last day. The table changed between it and the next sample."""

    table: TableName
    state: str
    since: datetime
    membership: str
    rows_copied: int | None
    snapshot_at: datetime | None
    error: str
    reason: str
    hint: str
    lsn: str | None
    remedy: str | None
    verified_through: str | None
    verified_at: datetime | None
    copying: CopyProgress | None = None
    live_bytes: int | None = None
    kept_bytes: int | None = None
    lag_seconds: float | None = None
    moved_at: datetime | None = None


class OverviewRecords(EventRecords, SampleRecords):
    """The records of a state database that pages show. The connection cannot write.

    Raises SourceConnectionError if the database does not let this session in, or does not answer a statement,
    within `limit_s` seconds.
    """

    def __init__(self, dsn: str, limit_s: float) -> None:
        super().__init__(_impatient(dsn, limit_s), "page")
        assert isinstance(self._connection, LimitedConnection)
        self._connection.answer_limit_s = limit_s
        with state_errors("opening a session that reads"), self._connection.cursor() as cursor:
            cursor.execute("SET default_transaction_read_only = on")

    def is_set_up(self) -> bool:
        """Return True if the schema exists, in any version. Raises StateError for a newer one."""
        return schema.is_set_up(self._connection)

    def read_pipelines(self) -> list[PipelineRow]:
        """Return all recorded pipelines, by name. Raises StateError if the schema is of an older version."""
        doing = "reading the pipelines"
        found = self._ask(doing, _PIPELINES)
        states: dict[str, dict[str, int]] = {}
        for pipeline, state, count in self._ask(doing, _STATES):
            states.setdefault(pipeline, {})[state] = count
        errored = {
            pipeline: ErroredTable(TableName(schema_name, name), *more)
            for pipeline, schema_name, name, *more in self._ask(doing, _ERRORED)
        }
        lags: dict[str, list[tuple[datetime, float | None]]] = {}
        for pipeline, step, seconds in self._ask(doing, _LAGS):
            lags.setdefault(pipeline, []).append((step, seconds))
        return [
            replace(
                _pipeline_row(fields),
                states=states.get(fields[0], {}),
                errored=errored.get(fields[0]),
                lags=lags.get(fields[0], ()),
            )
            for fields in found
        ]

    def read_table_rows(self, pipeline: str) -> list[TableRow]:
        """Return all recorded tables of a pipeline, by name; empty if the pipeline is not recorded."""
        doing, values = "reading the tables", {"pipeline": pipeline}
        found = self._ask(doing, _TABLES, values)
        moved = {
            TableName(schema_name, name): time for schema_name, name, time in self._ask(doing, _MOVED, values)
        }
        measured = self._ask(doing, _MEASURED, values)
        sizes, merges = measured[0] if measured else ({}, {})
        read = [_table_row(fields) for fields in found]
        return [
            replace(
                row,
                live_bytes=sizes.get(row.table.path, {}).get("live"),
                kept_bytes=sizes.get(row.table.path, {}).get("kept"),
                lag_seconds=merges.get(row.table.path, {}).get("waiting_s"),
                moved_at=moved.get(row.table),
            )
            for row in read
        ]

    def count_tables(self, pipeline: str) -> int:
        """Return the number of tables of a pipeline that have samples: those that are not removed."""
        [(count,)] = self._ask("counting the tables", _COUNT, {"pipeline": pipeline})
        return int(count)

    def read_relation(self, pipeline: str, table: TableName) -> Relation | None:
        """Return the definition for which the table's lake table was built; None if there is none yet."""
        values = {"pipeline": pipeline, "schema": table.schema, "table": table.name}
        found = self._ask("reading a table", _RELATION, values)
        return Relation.from_json(found[0][0]) if found and found[0][0] else None

    def read_publishers(self, pipeline: str) -> list[PublisherReport]:
        """Return the last reports of a pipeline's publishers, by name."""
        found = self._ask("reading the publishers", REPORTS, {"pipeline": pipeline})
        return [publisher_report(fields) for fields in found]

    def _ask(self, doing: str, statement: str, values: Mapping[str, object] | None = None) -> list[Any]:
        with state_errors(doing):
            try:
                return rows(self._connection, statement, values)
            except psycopg2.errors.UndefinedTable:
                raise older_schema(doing) from None


def _table_row(fields: tuple[Any, ...]) -> TableRow:
    schema_name, name, state, *more, copying = fields
    table, progress = TableName(schema_name, name), read_copy_progress(state, copying)
    return replace(TableRow(table, state, *more), copying=progress)


def _pipeline_row(fields: tuple[Any, ...]) -> PipelineRow:
    name, number, slot, lake, now, applied, rate, holder, reported_at = fields[:9]
    run = None if fields[9] is None else RunEvent(*fields[9:15])
    sample = None if fields[15] is None else LastSample(*fields[15:])
    return PipelineRow(name, number, slot, lake, now, applied, rate, holder or "", reported_at, run, sample)


def _impatient(dsn: str, limit_s: float) -> str:
    """Return the DSN with a limit for connecting; libpq takes whole seconds, and 2 at least."""
    try:
        text: str = psycopg2.extensions.make_dsn(dsn, connect_timeout=max(2, round(limit_s)))
    except psycopg2.Error:
        return dsn  # connect() raises the error, without the text that cannot be read
    return text
