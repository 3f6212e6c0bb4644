"""Recorded pipelines for tests of the page: tables of every state, a day of samples, hostile names."""

from __future__ import annotations

from airflow_provider_pgrepl.errors import ValueRangeError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.progress import TableBytes, TableMerges
from airflow_provider_pgrepl.replication.state.recorded_events import EventKind
from airflow_provider_pgrepl.replication.state.reports import PublisherReport, StoppedEvents
from airflow_provider_pgrepl.replication.state.samples import table_sample_interval_s
from airflow_provider_pgrepl.replication.state.tables import TableState

HOSTILE = TableName("public", "<img src=x onerror=\"document.title='ran'\">")
HOSTILE_ERROR = "</td><script>document.title='ran'</script><svg onload=\"document.title='ran'\">"
TASK = "task replicate of pgrepl_replicate, run manual__2026-01-31T12:00:00+00:00, try 2"
_SAMPLES = """
INSERT INTO _pgrepl.samples (pipeline, time, lag_seconds, lag_bytes, changes_per_s, bytes_per_s,
    wal_retained_bytes, wal_limit_bytes, slot_active)
SELECT %(pipeline)s, now() - minute * interval '1 minute',
    abs(sin(minute / 70.0) * 4 + sin(minute / 9.0)) + CASE WHEN minute %% 300 < 40 THEN 20 ELSE 0 END,
    4096 * minute, 50 + minute %% 30, 60000, 300000000, 1073741824, true
FROM generate_series(0, 1439) AS minute WHERE minute NOT BETWEEN 600 AND 700
"""
_TABLE_SAMPLES = """
INSERT INTO _pgrepl.table_samples (pipeline, time, schema_name, table_name, state, position_lsn, lag_seconds)
SELECT t.pipeline, now() - step * %(interval)s * interval '1 second', schema_name, table_name, state,
    '0/0'::pg_lsn + (144 - greatest(step, 3)), abs(sin(step / 9.0))
FROM _pgrepl.tables t, generate_series(0, 86399 / %(interval)s) AS step WHERE t.pipeline = %(pipeline)s
"""
_TABLES = """
INSERT INTO _pgrepl.tables (pipeline, schema_name, table_name, state, since, relation, position_lsn,
    snapshot_at, rows_copied)
SELECT %(pipeline)s, 'sales', 'orders_' || number, 'streaming', now() - interval '3 days', %(relation)s,
    '0/64', now() - interval '3 days', number * 1000
FROM generate_series(1, %(count)s) AS number
"""


def relation_of(table: TableName) -> Relation:
    columns = (
        Column("id", 1, 20, -1, "bigint", is_key=True, not_null=True),
        Column("<b>total</b>", 2, 1700, -1, "numeric(12,2)"),
        Column("placed_at", 3, 1184, -1, "timestamp with time zone", not_null=True),
    )
    return Relation(5, table, columns, relfilenode=7)


def record_pipeline(dsn: str, pg: Connection, name: str = "shop", tables: int = 40) -> None:
    """Record a running pipeline of `tables` streaming tables, one errored one with a hostile name, one paused
    and one that is copied."""
    pipeline = Pipeline(name=name, tables=("public.*",), lake=f"/lake/{name}")
    with StateDatabase(dsn, f"replicate {name}", TASK) as state_db, pg.cursor() as cursor:
        state_db.migrate()
        state_db.register(pipeline, "123", False, True)
        fields = {
            "pipeline": name,
            "count": tables,
            "relation": relation_of(HOSTILE).to_json(),
            "interval": int(table_sample_interval_s(tables)),
        }
        cursor.execute(_TABLES, fields)
        _stream(state_db, name, HOSTILE)
        _stream(state_db, name, TableName("public", "customers"))
        state_db.set_state(name, TableName("public", "customers"), TableState.PAUSED)
        for state in (TableState.PENDING, TableState.SNAPSHOTTING):
            state_db.set_state(name, TableName("public", "line_items"), state)
        error = ValueRangeError(HOSTILE_ERROR, HOSTILE_ERROR)
        state_db.mark_errored(name, state_db.read_tables(name)[HOSTILE], error, LSN(130))
        state_db.record_run(name, EventKind.STARTED)
        paths = [f"sales/orders_{number}" for number in range(1, tables + 1)]
        state_db.write_progress(
            name,
            applied_lsn=LSN(120),
            changes_per_s=61.5,
            holder="worker-1:71",
            table_bytes={
                path: TableBytes(size << 18, size << 19, size << 20) for size, path in enumerate(paths, 1)
            },
            table_merges={path: TableMerges(0.4, 5, 5, 1.5) for path in paths},
        )
        stopped = StoppedEvents((str(HOSTILE),), "1:0/6E:2", "TargetError", HOSTILE_ERROR, HOSTILE_ERROR)
        report = PublisherReport("events", "nats", ("public.*",), LSN(120), (stopped,), "worker-1:72")
        state_db.write_publisher(name, report)
        cursor.execute(_SAMPLES, fields)
        cursor.execute(_TABLE_SAMPLES, fields)


def _stream(state_db: StateDatabase, name: str, table: TableName) -> None:
    for state in (TableState.PENDING, TableState.SNAPSHOTTING):
        state_db.set_state(name, table, state)
    state_db.record_snapshot(name, relation_of(table), LSN(100), 17_000, bytes=5 << 20, seconds=2.5)
    for state in (TableState.CATCHING_UP, TableState.STREAMING):
        state_db.set_state(name, table, state, reached=LSN(110))
