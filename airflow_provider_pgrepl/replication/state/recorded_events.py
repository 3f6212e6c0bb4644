"""Events of a pipeline in `_pgrepl.events`: what happened to it and to its tables, when, and through which
program.

An event is written by the statement that changes the state, so that both are committed or neither is. Several
threads share a connection in autocommit mode, so a transaction of several statements is not possible.
Statements may be executed twice after a lost connection. An event is therefore written only if its statement
changed a record, or if the same event is not recorded yet.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any

import psycopg2.errors

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import rows

from .actor import ACTOR
from .connection import StateConnection, older_schema, state_errors, text_of

EVENT_DAYS = 90
"""The days for which events are kept: an incident is looked up for weeks, and a quarter is compared."""
EVENT_ROWS = 100_000
"""The most events of a pipeline: 50 for each of 2,000 tables, about 40 MB. A DAG that fails every minute for
three months would write more."""
_DELETED_AT_ONCE = 5_000
"""The most rows that a statement deletes: it takes milliseconds, and is repeated every few minutes."""

_COLUMNS = (
    "pipeline, schema_name, table_name, kind, from_state, to_state, actor, error, reason, hint, lsn, details"
)
INSERT = f"INSERT INTO _pgrepl.events ({_COLUMNS}) SELECT %(pipeline)s,"
"""The beginning of a statement that inserts an event. A SELECT list of the other columns follows."""

_LAST = "SELECT * FROM _pgrepl.events WHERE pipeline = %(pipeline)s AND table_name IS NULL"
_RECORD_RUN = f"""
{INSERT} NULL, NULL, %(kind)s, NULL, NULL, {ACTOR}, %(error)s, %(reason)s, %(hint)s, NULL, %(details)s::jsonb
WHERE EXISTS (SELECT FROM _pgrepl.pipelines WHERE name = %(pipeline)s) AND NOT EXISTS (
    SELECT FROM ({_LAST} ORDER BY id DESC LIMIT 1) AS last
    WHERE (last.kind, last.error, last.reason) = (%(kind)s, %(error)s, %(reason)s)
        AND (last.actor = {ACTOR} OR last.kind = 'failed'))
RETURNING 1
"""
_RECORD_EPOCH = f"""
{INSERT} NULL, NULL, 'epoch_begun', NULL, NULL, {ACTOR}, '', '', '', %(lsn)s::pg_lsn, %(details)s::jsonb
WHERE NOT EXISTS ({_LAST} AND kind = 'epoch_begun' AND lsn = %(lsn)s::pg_lsn AND details = %(details)s::jsonb)
RETURNING 1
"""
_RECORD_SKIP = f"""
{INSERT} NULL, NULL, 'skipped', NULL, NULL, {ACTOR}, '', %(reason)s, '', %(lsn)s::pg_lsn, %(details)s::jsonb
WHERE NOT EXISTS ({_LAST} AND kind = 'skipped' AND lsn = %(lsn)s::pg_lsn AND details = %(details)s::jsonb)
RETURNING 1
"""
_READ_RUN = """
SELECT kind, time, actor, error, reason, hint FROM _pgrepl.events
WHERE pipeline = %(pipeline)s AND table_name IS NULL AND kind IN ('started', 'stopped', 'failed')
ORDER BY id DESC LIMIT 1
"""
_READ = """
SELECT * FROM (
    SELECT id, pipeline, time, schema_name, table_name, kind, from_state, to_state, actor, error, reason,
        hint, lsn::text, details
    FROM _pgrepl.events
    WHERE pipeline = %(pipeline)s AND (%(since)s::timestamptz IS NULL OR time >= %(since)s)
        {table}
    ORDER BY id DESC LIMIT %(limit)s
) AS newest ORDER BY id
"""
_OF_TABLE = "AND schema_name = %(schema)s AND table_name = %(table)s"
# Times increase with ids, except for transactions that overlap. So the oldest rows are found by the primary
# key, of whatever pipeline: those of a pipeline that was torn down have no writer of their own.
_DELETE_OLD = """
DELETE FROM _pgrepl.events
WHERE id IN (SELECT id FROM _pgrepl.events ORDER BY id LIMIT %(at_once)s)
    AND time < now() - %(days)s * interval '1 day' RETURNING 1
"""
_DELETE_MORE = """
DELETE FROM _pgrepl.events WHERE id IN (
    SELECT id FROM _pgrepl.events WHERE pipeline = %(pipeline)s AND id <= (
        SELECT id FROM _pgrepl.events WHERE pipeline = %(pipeline)s ORDER BY id DESC OFFSET %(rows)s LIMIT 1)
    ORDER BY id LIMIT %(at_once)s) RETURNING 1
"""


class EventKind(StrEnum):
    """The kind of an event. `docs/reference/recorded-history.md` lists what each one records."""

    STATE_CHANGED = "state_changed"
    SNAPSHOT_TAKEN = "snapshot_taken"
    SCHEMA_CHANGED = "schema_changed"
    MEMBERSHIP_CHANGED = "membership_changed"
    TABLE_FORGOTTEN = "table_forgotten"
    REGISTERED = "registered"
    SLOT_CHANGED = "slot_changed"
    EPOCH_BEGUN = "epoch_begun"
    SKIPPED = "skipped"
    STARTED = "started"
    STOPPED = "stopped"
    FAILED = "failed"
    TORN_DOWN = "torn_down"


@dataclass(frozen=True)
class RecordedEvent:
    """An event of a pipeline, or of one of its tables.

    `table` is None for an event of the pipeline. `error` is the class of an error, with its reason and hint.
    `details` has the other facts of its kind, such as rows, bytes and seconds of a snapshot.
    """

    id: int
    pipeline: str
    time: datetime
    table: TableName | None
    kind: str
    from_state: str | None
    to_state: str | None
    actor: str
    error: str = ""
    reason: str = ""
    hint: str = ""
    lsn: LSN | None = None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RunEvent:
    """The last start, stop or failure of a replication app. `kind`: `started`, `stopped`,
    `failed`."""

    kind: str
    time: datetime
    actor: str
    error: str = ""
    reason: str = ""
    hint: str = ""

    @property
    def has_ended(self) -> bool:
        return self.kind != EventKind.STARTED

    def has_ended_since(self, reported_at: datetime | None) -> bool:
        """Return True if this is the end of the app that reported last: an older end is of an earlier one."""
        return self.has_ended and (reported_at is None or self.time >= reported_at)


def schema_changes(before: Relation, after: Relation) -> dict[str, Any]:
    """Return the differences of names and types of two relations of a table, empty if there are none.

    Columns are followed by their attnum. Keys: `added`, `dropped`, `renamed`, `retyped`, `table_renamed`.
    """
    old, new = ({column.attnum: column for column in one.columns} for one in (before, after))
    names = list(dict.fromkeys((before.source_table, after.source_table)))
    kept = [(old[attnum], new[attnum]) for attnum in old.keys() & new.keys()]
    changes: dict[str, Any] = {
        "added": [new[attnum].name for attnum in sorted(new.keys() - old.keys())],
        "dropped": [old[attnum].name for attnum in sorted(old.keys() - new.keys())],
        "renamed": {was.name: now.name for was, now in kept if was.name != now.name},
        "retyped": {
            now.name: [was.type_name, now.type_name] for was, now in kept if was.type_name != now.type_name
        },
        "table_renamed": [] if len(names) == 1 else [str(name) for name in names],
    }
    return {key: value for key, value in changes.items() if value}


class EventRecords(StateConnection):
    """The recorded events of pipelines."""

    def record_run(self, pipeline: str, kind: EventKind, error: PgReplError | None = None) -> None:
        """Record that an app of the pipeline started, stopped or failed.

        Does nothing if the pipeline is not recorded, or if the pipeline's last event is the same: a task that
        is retried for days fails many times for one reason.
        """
        fields = {
            "kind": kind.value,
            "error": type(error).__name__ if error else "",
            "reason": error.message if error else "",
            "hint": error.hint if error else "",
        }
        self._record(_RECORD_RUN, pipeline, fields, {})

    def record_epoch(self, pipeline: str, epoch: Epoch, begins: LSN) -> None:
        """Record that an epoch has begun at an LSN, once."""
        self._record(_RECORD_EPOCH, pipeline, {"lsn": text_of(begins)}, {"epoch": int(epoch)})

    def record_skip(self, pipeline: str, epoch: Epoch, lsn: LSN, xid: int, reason: str) -> None:
        """Record that the transaction which commits at an LSN was skipped, once.

        :param reason: the error with which the server could not send it
        """
        details = {"epoch": int(epoch), "xid": xid}
        self._record(_RECORD_SKIP, pipeline, {"lsn": text_of(lsn), "reason": reason}, details)

    def _record(
        self, statement: str, pipeline: str, fields: Mapping[str, object], details: Mapping[str, object]
    ) -> None:
        values = {**self._actor, "pipeline": pipeline, "details": json.dumps(details), **fields}
        with state_errors("recording an event"):
            rows(self._connection, statement, values)

    def read_run(self, pipeline: str) -> RunEvent | None:
        """Return the last start, stop or failure of the pipeline's replication app, None before the first."""
        with state_errors("reading the last run"):
            found = rows(self._connection, _READ_RUN, {"pipeline": pipeline})
        return RunEvent(*found[0]) if found else None

    def read_events(
        self,
        pipeline: str,
        table: TableName | None = None,
        since: datetime | None = None,
        limit: int = 100,
    ) -> list[RecordedEvent]:
        """Return the newest events of a pipeline, at most `limit`, oldest first.

        Events are also returned for a pipeline that was torn down. Raises StateError if the schema is of an
        older version.

        :param table: only the events of this table
        :param since: with time zone; only events at or after it
        """
        values: dict[str, object] = {"pipeline": pipeline, "since": since, "limit": limit}
        if table is not None:
            values |= {"schema": table.schema, "table": table.name}
        statement = _READ.format(table="" if table is None else _OF_TABLE)
        doing = "reading the events"
        with state_errors(doing):
            try:
                found = rows(self._connection, statement, values)
            except psycopg2.errors.UndefinedTable:
                raise older_schema(doing) from None
        return [_event(fields) for fields in found]

    def delete_old_events(self, pipeline: str) -> None:
        """Delete events that are older than EVENT_DAYS, of any pipeline, and those of this pipeline beyond
        EVENT_ROWS. Deletes a few thousand at once; the next call deletes more."""
        values = {
            "pipeline": pipeline,
            "days": EVENT_DAYS,
            "rows": EVENT_ROWS,
            "at_once": _DELETED_AT_ONCE,
        }
        with state_errors("deleting old events"):
            rows(self._connection, _DELETE_OLD, values)
            rows(self._connection, _DELETE_MORE, values)


def _event(fields: tuple[Any, ...]) -> RecordedEvent:
    number, pipeline, time, schema, name, kind, before, after, actor, error, reason, hint, lsn, details = (
        fields
    )
    return RecordedEvent(
        number,
        pipeline,
        time,
        None if name is None else TableName(schema, name),
        kind,
        before,
        after,
        actor,
        error,
        reason,
        hint,
        None if lsn is None else LSN.parse(lsn),
        details,
    )
