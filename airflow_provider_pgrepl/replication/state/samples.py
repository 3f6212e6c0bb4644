"""Samples of a pipeline and of its tables: `_pgrepl.samples` has one row a minute, and
`_pgrepl.table_samples` one row for each table every ten minutes or more.

The replication app writes and deletes them, so a pipeline that does not run has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg2.errors

from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import rows

from .connection import StateConnection, older_schema, state_errors, text_of

SAMPLE_DAYS = 14
"""The days for which samples are kept: the present week can be compared with the last one."""
SAMPLE_ROWS = SAMPLE_DAYS * 24 * 60
"""The most samples of a pipeline: one a minute, about 4 MB."""
TABLE_SAMPLE_DAYS = 7
TABLE_SAMPLE_ROWS = 200_000
"""The most table samples of a pipeline, about 40 MB with their indexes."""
TABLE_SAMPLE_INTERVAL_S = 600.0
"""The least seconds between two samples of a table. Maintenance measures tables at this interval."""
_DELETED_AT_ONCE = 5_000
"""The most rows that a statement deletes: it takes milliseconds, and is repeated every few minutes."""

_WRITE = """
INSERT INTO _pgrepl.samples (pipeline, received_lsn, durable_lsn, confirmed_lsn, applied_lsn, wal_lsn,
    lag_seconds, lag_bytes, changes_per_s, bytes_per_s, wal_retained_bytes, wal_limit_bytes, slot_active,
    memory_bytes)
VALUES (%(pipeline)s, %(received_lsn)s::pg_lsn, %(durable_lsn)s::pg_lsn, %(confirmed_lsn)s::pg_lsn,
    %(applied_lsn)s::pg_lsn, %(wal_lsn)s::pg_lsn, %(lag_seconds)s, %(lag_bytes)s, %(changes_per_s)s,
    %(bytes_per_s)s, %(wal_retained_bytes)s, %(wal_limit_bytes)s, %(slot_active)s, %(memory_bytes)s)
ON CONFLICT DO NOTHING RETURNING 1
"""
_READ = """
SELECT * FROM (
    SELECT time, received_lsn::text, durable_lsn::text, confirmed_lsn::text, applied_lsn::text, wal_lsn::text,
        lag_seconds, lag_bytes, changes_per_s, bytes_per_s, wal_retained_bytes, wal_limit_bytes, slot_active,
        memory_bytes
    FROM _pgrepl.samples
    WHERE pipeline = %(pipeline)s AND (%(since)s::timestamptz IS NULL OR time >= %(since)s)
    ORDER BY time DESC LIMIT %(limit)s
) AS newest ORDER BY time
"""
_TABLES = """
SELECT schema_name, table_name FROM _pgrepl.tables WHERE pipeline = %s AND state <> 'removed'
"""
# The position in the record of a table is that of its snapshot; without lake tables it advances.
_WRITE_TABLES = """
INSERT INTO _pgrepl.table_samples (pipeline, schema_name, table_name, state, position_lsn, lag_seconds,
    live_bytes, kept_bytes, merge_seconds)
SELECT t.pipeline, t.schema_name, t.table_name, t.state, greatest(known.position, t.position_lsn),
    (merges.value ->> 'waiting_s')::float8, (bytes.value ->> 'live')::bigint,
    (bytes.value ->> 'kept')::bigint, (merges.value ->> 'seconds')::float8
FROM ROWS FROM (pg_catalog.unnest(%(schemas)s::text[]), pg_catalog.unnest(%(names)s::text[]),
        pg_catalog.unnest(%(paths)s::text[]), pg_catalog.unnest(%(positions)s::pg_lsn[]))
        AS known (schema_name, table_name, path, position)
    JOIN _pgrepl.tables t USING (schema_name, table_name)
    LEFT JOIN (SELECT found.* FROM _pgrepl.progress p, pg_catalog.jsonb_each(p.table_bytes) AS found
        WHERE p.pipeline = %(pipeline)s) AS bytes ON bytes.key = known.path
    LEFT JOIN (SELECT found.* FROM _pgrepl.progress p, pg_catalog.jsonb_each(p.table_merges) AS found
        WHERE p.pipeline = %(pipeline)s) AS merges ON merges.key = known.path
WHERE t.pipeline = %(pipeline)s AND t.state <> 'removed'
ON CONFLICT DO NOTHING RETURNING 1
"""
_READ_TABLES = """
SELECT * FROM (
    SELECT time, schema_name, table_name, state, position_lsn::text, lag_seconds, live_bytes, kept_bytes,
        merge_seconds
    FROM _pgrepl.table_samples
    WHERE pipeline = %(pipeline)s AND (%(since)s::timestamptz IS NULL OR time >= %(since)s)
        {table}
    ORDER BY time DESC LIMIT %(limit)s
) AS newest ORDER BY time, schema_name, table_name
"""
_OF_TABLE = "AND schema_name = %(schema)s AND table_name = %(table)s"
# `ctid` makes each deletion of a bounded number of rows one index scan and one lookup for each row.
_DELETE_OLD = """
DELETE FROM _pgrepl.{table} WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM _pgrepl.{table} WHERE pipeline = %(pipeline)s AND time < greatest(
        now() - %(days)s * interval '1 day',
        (SELECT time FROM _pgrepl.{table} WHERE pipeline = %(pipeline)s
            ORDER BY time DESC OFFSET %(rows)s - 1 LIMIT 1))
    ORDER BY time LIMIT %(at_once)s)) RETURNING 1
"""


@dataclass(frozen=True)
class Sample:
    """A pipeline at one point in time. A value that was not known is None.

    `lag_seconds`: the age of the newest source transaction that the lake shows completely, 0 if the lake
    shows all. `lag_bytes`: the source's WAL after it. `wal_retained_bytes`: WAL that the server keeps for the
    slot. `wal_limit_bytes`: `max_slot_wal_keep_size`, None without a limit. `memory_bytes`: resident memory
    of the app's driver process.
    """

    time: datetime | None = None
    received_lsn: LSN | None = None
    durable_lsn: LSN | None = None
    confirmed_lsn: LSN | None = None
    applied_lsn: LSN | None = None
    wal_lsn: LSN | None = None
    lag_seconds: float | None = None
    lag_bytes: int | None = None
    changes_per_s: float | None = None
    bytes_per_s: float | None = None
    wal_retained_bytes: int | None = None
    wal_limit_bytes: int | None = None
    slot_active: bool | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True)
class TableSample:
    """A table at one point in time. A value that was not known is None.

    `position_lsn`: the position of the lake table's last commit that this run of the app made, else
    that of the snapshot. `lag_seconds`: the age of the oldest received change that is not merged, 0 without
    one. `live_bytes`, `kept_bytes`: as of the last maintenance. `merge_seconds`: duration of the last merge.
    """

    time: datetime
    table: TableName
    state: str
    position_lsn: LSN | None
    lag_seconds: float | None
    live_bytes: int | None
    kept_bytes: int | None
    merge_seconds: float | None


def table_sample_interval_s(tables: int) -> float:
    """Return the seconds between two samples of the tables of a pipeline.

    With many tables it is long enough to keep TABLE_SAMPLE_DAYS within TABLE_SAMPLE_ROWS.
    """
    return max(TABLE_SAMPLE_INTERVAL_S, TABLE_SAMPLE_DAYS * 86_400 * tables / TABLE_SAMPLE_ROWS)


class SampleRecords(StateConnection):
    """The recorded samples of pipelines."""

    def write_sample(self, pipeline: str, sample: Sample) -> None:
        """Record a sample at the time of the state database; the time in `sample` is not used."""
        values = {
            name: str(value) if isinstance(value, LSN) else value for name, value in asdict(sample).items()
        }
        with state_errors("recording a sample"):
            rows(self._connection, _WRITE, {**values, "pipeline": pipeline})

    def write_table_samples(self, pipeline: str, positions: Mapping[str, LSN]) -> int:
        """Record a sample of each table that is not removed, and return their number.

        Sizes and merges are those of the recorded progress.

        :param positions: positions of lake tables by path, those that are known
        """
        with state_errors("recording samples of tables"):
            tables = [TableName(*found) for found in rows(self._connection, _TABLES, (pipeline,))]
            values = {
                "pipeline": pipeline,
                "schemas": [table.schema for table in tables],
                "names": [table.name for table in tables],
                "paths": [table.path for table in tables],
                "positions": [text_of(positions.get(table.path)) for table in tables],
            }
            return len(rows(self._connection, _WRITE_TABLES, values))

    def read_samples(
        self, pipeline: str, since: datetime | None = None, limit: int = SAMPLE_ROWS
    ) -> list[Sample]:
        """Return the newest samples of a pipeline, at most `limit`, oldest first.

        Raises StateError if the schema is of an older version.

        :param since: with time zone; only samples at or after it
        """
        values = {"pipeline": pipeline, "since": since, "limit": limit}
        return [_sample(found) for found in self._read_history("reading the samples", _READ, values)]

    def read_table_samples(
        self,
        pipeline: str,
        table: TableName | None = None,
        since: datetime | None = None,
        limit: int = TABLE_SAMPLE_ROWS,
    ) -> list[TableSample]:
        """Return the newest samples of a table, or of all tables, as `read_samples` does."""
        values: dict[str, object] = {"pipeline": pipeline, "since": since, "limit": limit}
        if table is not None:
            values |= {"schema": table.schema, "table": table.name}
        statement = _READ_TABLES.format(table="" if table is None else _OF_TABLE)
        return [
            TableSample(time, TableName(schema, name), state, _lsn(position), *more)
            for time, schema, name, state, position, *more in self._read_history(
                "reading the samples of tables", statement, values
            )
        ]

    def delete_old_samples(self, pipeline: str) -> None:
        """Delete samples of the pipeline that are too old or too many. Deletes a few thousand at once; the
        next call deletes more."""
        with state_errors("deleting old samples"):
            for table, days, most in (
                ("samples", SAMPLE_DAYS, SAMPLE_ROWS),
                ("table_samples", TABLE_SAMPLE_DAYS, TABLE_SAMPLE_ROWS),
            ):
                values = {"pipeline": pipeline, "days": days, "rows": most, "at_once": _DELETED_AT_ONCE}
                rows(self._connection, _DELETE_OLD.format(table=table), values)

    def _read_history(
        self, doing: str, statement: str, values: Mapping[str, object]
    ) -> list[tuple[Any, ...]]:
        with state_errors(doing):
            try:
                return rows(self._connection, statement, values)
            except psycopg2.errors.UndefinedTable:
                raise older_schema(doing) from None


def _sample(fields: tuple[Any, ...]) -> Sample:
    time, *more = fields
    received, durable, confirmed, applied, wal, *measured = more
    return Sample(time, _lsn(received), _lsn(durable), _lsn(confirmed), _lsn(applied), _lsn(wal), *measured)


def _lsn(text: str | None) -> LSN | None:
    return None if text is None else LSN.parse(text)
