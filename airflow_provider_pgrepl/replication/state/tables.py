"""Records of tables: the state of each one, and its last snapshot.

Also the relations that a snapshot selected before an epoch began, to which settings are bound. The lake's
relation index has every later selection; before the first epoch there is no lake.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Literal

from airflow_provider_pgrepl.errors import BusyError, PgReplError, Remedy, StateError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import rows

from .actor import ACTOR
from .connection import StateConnection, state_errors, text_of
from .recorded_events import INSERT, schema_changes
from .reports import CopyProgress, read_copy_progress

_KEY = "pipeline = %(pipeline)s AND schema_name = %(schema)s AND table_name = %(table)s"
_EVENT = f"{INSERT} %(schema)s, %(table)s,"
_STATE_EVENT = f"""
{_EVENT} 'state_changed', from_state, to_state, {ACTOR}, error, reason, hint, lsn, details
FROM (SELECT from_state, t.state AS to_state, t.error, t.reason, t.hint,
    coalesce(t.lsn, %(reached)s::pg_lsn) AS lsn, %(details)s::jsonb AS details FROM changed t) AS event
"""
# The row is locked first, so that the event has the state which the update replaces.
_SET_STATE = f"""
WITH earlier AS (
    SELECT state, error, reason FROM _pgrepl.tables WHERE {_KEY} FOR UPDATE
), changed AS (
    UPDATE _pgrepl.tables t SET state = %(state)s, error = %(error)s, reason = %(reason)s, hint = %(hint)s,
        remedy = %(remedy)s, lsn = %(lsn)s::pg_lsn, trace = %(trace)s, copying = NULL,
        since = CASE WHEN t.state = %(state)s THEN since ELSE now() END
    FROM earlier
    WHERE {_KEY} AND t.state = ANY (%(before)s)
    RETURNING t.*, earlier.state AS from_state, earlier.error AS earlier_error,
        earlier.reason AS earlier_reason
), event AS (
    {_STATE_EVENT} WHERE EXISTS (SELECT FROM changed
        WHERE (from_state, earlier_error, earlier_reason) IS DISTINCT FROM (state, error, reason))
)
SELECT 1 FROM changed
"""
_ADD_PENDING = f"""
WITH changed AS (
    INSERT INTO _pgrepl.tables (pipeline, schema_name, table_name, state, reason, hint, remedy, lsn, trace)
    VALUES (%(pipeline)s, %(schema)s, %(table)s, %(state)s, %(reason)s, %(hint)s, %(remedy)s,
        %(lsn)s::pg_lsn, %(trace)s)
    ON CONFLICT DO NOTHING RETURNING *, NULL AS from_state
), event AS ({_STATE_EVENT})
SELECT 1 FROM changed
"""
_TABLES = """
SELECT schema_name, table_name, state, error, reason, hint, lsn::text, since, relation, position_lsn::text,
    snapshot_at, rows_copied, membership, config, remedy, trace, verified_through::text, verified_at, copying
FROM _pgrepl.tables WHERE pipeline = %s ORDER BY schema_name, table_name
"""
_CONDITIONS = """
SELECT schema_name, table_name, state, error, since FROM _pgrepl.tables WHERE pipeline = %s
"""
# A statement that is repeated after a lost connection finds its own position.
_RECORD_SNAPSHOT = f"""
WITH earlier AS (
    SELECT position_lsn FROM _pgrepl.tables WHERE {_KEY} FOR UPDATE
), changed AS (
    UPDATE _pgrepl.tables t SET relation = %(relation)s, position_lsn = %(position)s::pg_lsn,
        snapshot_at = now(), rows_copied = %(rows)s, config = %(config)s,
        verified_through = NULL, verified_at = NULL
    FROM earlier WHERE {_KEY} RETURNING earlier.position_lsn AS earlier_position
), event AS (
    {_EVENT} 'snapshot_taken', NULL, NULL, {ACTOR}, '', '', '', %(position)s::pg_lsn, %(details)s::jsonb
    FROM changed WHERE earlier_position IS DISTINCT FROM %(position)s::pg_lsn
)
SELECT 1 FROM changed
"""
_RECORD_VERIFIED = f"""
UPDATE _pgrepl.tables SET verified_through = %(through)s::pg_lsn, verified_at = %(at)s
WHERE {_KEY} AND snapshot_at IS NOT DISTINCT FROM %(snapshot_at)s RETURNING 1
"""
_READ_RELATION = f"SELECT relation FROM _pgrepl.tables WHERE {_KEY} AND position_lsn = %(position)s::pg_lsn"
_SCHEMA_EVENT = f"""
{_EVENT} 'schema_changed', NULL, NULL, {ACTOR}, '', '', '', %(reached)s::pg_lsn, %(details)s::jsonb
FROM changed WHERE %(details)s::jsonb <> '{{}}'
"""
_RECORD_RELATION = f"""
WITH changed AS (
    UPDATE _pgrepl.tables SET relation = %(relation)s
    WHERE {_KEY} AND position_lsn = %(position)s::pg_lsn AND relation IS NOT DISTINCT FROM %(before)s
    RETURNING 1
), event AS ({_SCHEMA_EVENT})
SELECT 1 FROM changed
"""
_RECORD_WATCHED = """
UPDATE _pgrepl.tables SET position_lsn = %(through)s::pg_lsn
WHERE pipeline = %(pipeline)s AND position_lsn = %(seen)s::pg_lsn AND state IN ('catching_up', 'streaming')
    AND (schema_name, table_name) IN (SELECT * FROM unnest(%(schemas)s::text[], %(tables)s::text[]))
RETURNING 1
"""
_RECORD_WATCHED_RELATION = f"""
WITH changed AS (
    UPDATE _pgrepl.tables SET position_lsn = %(reached)s::pg_lsn, relation = %(relation)s
    WHERE {_KEY} AND position_lsn = %(position)s::pg_lsn AND state IN ('catching_up', 'streaming')
    RETURNING 1
), event AS ({_SCHEMA_EVENT})
SELECT 1 FROM changed
"""
_MARK_ERRORED = f"""
WITH changed AS (
    UPDATE _pgrepl.tables SET state = 'errored', error = %(error)s, reason = %(reason)s, hint = %(hint)s,
        remedy = %(remedy)s, lsn = %(lsn)s::pg_lsn, trace = %(trace)s, since = now()
    WHERE {_KEY} AND state = %(state)s AND relation IS NOT DISTINCT FROM %(relation)s
    RETURNING *, %(state)s AS from_state
), event AS ({_STATE_EVENT})
SELECT 1 FROM changed
"""
_MOVE = f"""
WITH changed AS (
    UPDATE _pgrepl.tables SET state = %(state)s, error = '', reason = %(reason)s, hint = '', remedy = NULL,
        lsn = NULL, trace = '', since = now(), membership = coalesce(%(membership)s, membership),
        config = coalesce(%(config)s, config)
    WHERE {_KEY} AND state = %(seen)s AND since = %(since)s
        AND position_lsn IS NOT DISTINCT FROM %(position)s::pg_lsn
    RETURNING *, %(seen)s AS from_state
), event AS ({_STATE_EVENT})
SELECT 1 FROM changed
"""
_SET_MEMBERSHIP = f"""
WITH earlier AS (
    SELECT membership FROM _pgrepl.tables WHERE {_KEY} FOR UPDATE
), changed AS (
    UPDATE _pgrepl.tables t SET membership = %(membership)s FROM earlier WHERE {_KEY}
    RETURNING earlier.membership AS earlier_membership
), event AS (
    {_EVENT} 'membership_changed', NULL, NULL, {ACTOR}, '', '', '', NULL,
        pg_catalog.jsonb_build_object('from', earlier_membership, 'to', %(membership)s::text)
    FROM changed WHERE earlier_membership <> %(membership)s
)
SELECT 1 FROM changed
"""
_FORGET = f"""
WITH changed AS (
    DELETE FROM _pgrepl.tables WHERE {_KEY} RETURNING state
), event AS (
    {_EVENT} 'table_forgotten', state, NULL, {ACTOR}, '', '', '', NULL, '{{}}' FROM changed
)
SELECT 1 FROM changed
"""
Membership = Literal["configured", "added", "removed"]
_ADD = """
INSERT INTO _pgrepl.selected_relations (pipeline, relation_id, relation_version, relation)
SELECT %s, * FROM ROWS FROM (pg_catalog.unnest(%s::bigint[]), pg_catalog.unnest(%s::bigint[]),
    pg_catalog.unnest(%s::text[])) AS selected
ON CONFLICT DO NOTHING RETURNING 1
"""


class TableState(StrEnum):
    """The state of a table on its way from the source into the lake.

    pending       set by the snapshot app when the table joins the pipeline; the lake has nothing of it yet.
    snapshotting  set by the snapshot app before the first byte is copied. If the snapshot fails, the table is
                  errored, or has its earlier state if nothing was copied yet. If the app is killed, the table
                  keeps this state until the snapshot app runs again.
    catching_up   set by the snapshot app when the copy is committed at its position; later changes still have
                  to be applied. Also set by an operator who resumes a paused table or retries an errored one.
    streaming     set by the replication app when the table has applied all that the other tables have.
    errored       set by the app that met the error, with its class, reason, hint and LSN. This table stops;
                  the other tables and the slot continue. To recover, run the snapshot app, which resnapshots
                  the table, or retry the table when the cause is gone.
    paused        set by an operator, or by a repair until it ends; changes are kept in the changelog and not
                  applied.
    removed       set by an operator, or by the snapshot app when the table is no longer in the pipeline's
                  configuration; its lake table stays unchanged.
    """

    PENDING = "pending"
    SNAPSHOTTING = "snapshotting"
    CATCHING_UP = "catching_up"
    STREAMING = "streaming"
    ERRORED = "errored"
    PAUSED = "paused"
    REMOVED = "removed"

    @property
    def is_being_copied(self) -> bool:
        """Return True if the lake has no rows of the table yet, or is about to get others."""
        return self in (TableState.PENDING, TableState.SNAPSHOTTING)

    @property
    def is_followed(self) -> bool:
        """Return True if the table's changes are being applied."""
        return self in (TableState.CATCHING_UP, TableState.STREAMING)

    @property
    def needs_changes(self) -> bool:
        """Return True if the table's changes are applied now, or will be when the table is resumed."""
        return self.is_followed or self is TableState.PAUSED


_S = TableState
_FOLLOWERS: dict[TableState | None, frozenset[TableState]] = {
    None: frozenset({_S.PENDING}),
    _S.PENDING: frozenset({_S.SNAPSHOTTING}),
    _S.SNAPSHOTTING: frozenset({_S.CATCHING_UP}),
    _S.CATCHING_UP: frozenset({_S.STREAMING, _S.SNAPSHOTTING}),
    _S.STREAMING: frozenset({_S.SNAPSHOTTING}),
    _S.ERRORED: frozenset({_S.SNAPSHOTTING, _S.CATCHING_UP}),
    _S.PAUSED: frozenset({_S.CATCHING_UP}),
    _S.REMOVED: frozenset({_S.PENDING}),
}
REPAIRING = "it is being repaired by pgrepl verify --repair"
"""The recorded reason of a table that a repair has paused."""
_FROM_ANYWHERE = frozenset({_S.ERRORED, _S.PAUSED, _S.REMOVED})


def may_follow(now: TableState | None, wanted: TableState) -> bool:
    """Return True if a table in state `now` (None: not recorded) may be set to `wanted`. The same state is
    always allowed."""
    if now is None:
        return wanted in _FOLLOWERS[None]
    return wanted == now or wanted in _FROM_ANYWHERE or wanted in _FOLLOWERS[now]


def check_transition(now: TableState | None, wanted: TableState, table: str) -> None:
    """Raise StateError, which names the table, if `wanted` may not follow `now`."""
    if not may_follow(now, wanted):
        raise StateError(f"{table}: is {now or 'unknown'}, and cannot become {wanted}")


def states_before(wanted: TableState) -> frozenset[TableState]:
    """Return the states from which `wanted` can be reached in one step."""
    return frozenset(state for state in TableState if may_follow(state, wanted))


@dataclass(frozen=True)
class TableRecord:
    """The record of a table.

    `error` is the class of the error and `lsn` its position. `remedy` is what a user must do, for programs;
    `hint` is the same for people. `trace` has classes and frames of the unexpected exception that was the
    cause, if any.

    `position_lsn`, `snapshot_at` and `rows_copied` are those of the last snapshot, and `config` is the
    pipeline file with which it was made. `relation` is the relation for which the lake table was built then,
    with the changes since. `membership`: whether the pipeline file alone selects the table, or an operator
    has added or removed it. `verified_through` and `verified_at`: the LSN and the time at which the table was
    last found equal to its source, since the last snapshot. `copying`: the progress of a copy that has not
    ended.
    """

    table: TableName
    state: TableState
    error: str
    reason: str
    hint: str
    lsn: LSN | None
    since: datetime
    relation: Relation | None
    position_lsn: LSN | None
    snapshot_at: datetime | None
    rows_copied: int | None
    membership: Membership = "configured"
    config: str | None = None
    remedy: Remedy | None = None
    trace: str = ""
    verified_through: LSN | None = None
    verified_at: datetime | None = None
    copying: CopyProgress | None = None
    relation_text: str | None = field(default=None, repr=False, compare=False)
    """The relation's JSON as it is recorded: an older version may have written other JSON for the same
    relation."""

    @property
    def is_paused_by_repair(self) -> bool:
        """True if a repair has paused the table, and has not ended or was killed."""
        return self.state is TableState.PAUSED and self.reason == REPAIRING


@dataclass(frozen=True)
class TableCondition:
    """The state of a table, without the rest of its record. `error`: the class of its error."""

    state: TableState
    error: str
    since: datetime


class TableRecords(StateConnection):
    """The recorded tables of pipelines."""

    def read_conditions(self, pipeline: str) -> dict[TableName, TableCondition]:
        """Return the states of all recorded tables of a pipeline: less to read than `read_tables`."""
        with state_errors("reading the states of tables"):
            found = rows(self._connection, _CONDITIONS, (pipeline,))
        return {
            TableName(schema, table): TableCondition(TableState(state), error, since)
            for schema, table, state, error, since in found
        }

    def read_tables(self, pipeline: str) -> dict[TableName, TableRecord]:
        """Return all recorded tables of a pipeline, by name."""
        with state_errors("reading the tables"):
            found = [_table_record(fields) for fields in rows(self._connection, _TABLES, (pipeline,))]
        return {record.table: record for record in found}

    def set_state(
        self,
        pipeline: str,
        table: TableName,
        state: TableState,
        *,
        error: str = "",
        reason: str = "",
        hint: str = "",
        lsn: LSN | None = None,
        remedy: Remedy | None = None,
        trace: str = "",
        reached: LSN | None = None,
    ) -> None:
        """Set the state of a table. Raises StateError if it may not follow the present state.

        :param lsn: the position of the error
        :param reached: the table's position, for the event
        """
        fields = {
            **_table_key(pipeline, table),
            "state": state.value,
            "error": error,
            "reason": reason,
            "hint": hint,
            "remedy": remedy,
            "lsn": text_of(lsn),
            "trace": trace,
            "before": [before.value for before in states_before(state)],
            **self._event(reached),
        }
        with state_errors(f"setting the state of {table}"):
            changed = rows(self._connection, _SET_STATE, fields)
            if not changed and state is TableState.PENDING:
                changed = rows(self._connection, _ADD_PENDING, fields)
        if not changed:
            record = self.read_tables(pipeline).get(table)
            check_transition(record.state if record else None, state, str(table))
            raise BusyError(
                f"{table}: another process changed its state at the same time",
                "run the command again, which reads the new state",
            )

    def mark_errored(
        self, pipeline: str, seen: TableRecord, error: PgReplError, lsn: LSN | None = None
    ) -> bool:
        """Set a table to `errored` if its state and relation are still as in `seen`, and return True if
        so."""
        fields = {
            **_table_key(pipeline, seen.table),
            "error": type(error).__name__,
            "reason": error.message,
            "hint": error.hint,
            "remedy": error.remedy,
            "lsn": text_of(lsn),
            "trace": error.trace,
            "state": seen.state.value,
            "relation": seen.relation_text,
            **self._event(),
        }
        with state_errors(f"marking {seen.table} errored"):
            return bool(rows(self._connection, _MARK_ERRORED, fields))

    def move(
        self,
        pipeline: str,
        seen: TableRecord,
        state: TableState,
        *,
        membership: Membership | None = None,
        config: str | None = None,
        reason: str = "",
        reached: LSN | None = None,
    ) -> bool:
        """Set a table to another state and return True, or return False if its state or its snapshot has
        changed since it was read as `seen`.

        The error is cleared, and its reason unless another one is given. `membership` and `config` are
        recorded if they are given. Raises StateError if the state may not follow the one in `seen`.

        :param reached: the table's position, for the event
        """
        check_transition(seen.state, state, str(seen.table))
        fields = {
            **_table_key(pipeline, seen.table),
            "state": state.value,
            "membership": membership,
            "config": config,
            "reason": reason,
            "seen": seen.state.value,
            "since": seen.since,
            "position": text_of(seen.position_lsn),
            **self._event(reached, {} if membership is None else {"membership": membership}),
        }
        with state_errors(f"setting the state of {seen.table}"):
            return bool(rows(self._connection, _MOVE, fields))

    def set_membership(self, pipeline: str, table: TableName, membership: Membership) -> None:
        """Record whether the pipeline file, or an operator, selects the table. Raises StateError if the table
        is not recorded."""
        fields = {**_table_key(pipeline, table), **self._event(), "membership": membership}
        with state_errors(f"recording who wants {table}"):
            if not rows(self._connection, _SET_MEMBERSHIP, fields):
                raise StateError(f"{table}: not recorded as a table of pipeline {pipeline}")

    def record_relation(
        self, pipeline: str, relation: Relation, position: LSN, reached: LSN | None = None
    ) -> None:
        """Record the present relation of a lake table. Does nothing if the table's position is not
        `position`, the position of its snapshot, or if the relation is recorded already.

        :param reached: the position of the lake table, for the event
        """
        fields = {
            **_table_key(pipeline, relation.table),
            "relation": relation.to_json(),
            "position": str(position),
        }
        with state_errors(f"recording the shape of {relation.table}"):
            while found := rows(self._connection, _READ_RELATION, fields):
                before = found[0][0]
                if before == fields["relation"]:
                    return
                event = self._event(reached, _differences(before, relation))
                if rows(self._connection, _RECORD_RELATION, {**fields, **event, "before": before}):
                    return

    def record_watched(self, pipeline: str, tables: Collection[TableName], seen: LSN, through: LSN) -> None:
        """Record that definitions of the tables were checked up to `through`. Only tables in `catching_up` or
        `streaming` whose recorded position is `seen` are changed."""
        fields = {
            "pipeline": pipeline,
            "schemas": [table.schema for table in tables],
            "tables": [table.name for table in tables],
            "seen": str(seen),
            "through": str(through),
        }
        with state_errors("recording how far tables are watched"):
            rows(self._connection, _RECORD_WATCHED, fields)

    def record_watched_relation(
        self, pipeline: str, table: TableName, seen: LSN, through: LSN, relation: Relation
    ) -> None:
        """Do what `record_watched` does for a table whose relation has changed, and record the relation."""
        fields = {
            **_table_key(pipeline, table),
            "relation": relation.to_json(),
            "position": str(seen),
        }
        with state_errors(f"recording the shape of {table}"):
            found = rows(self._connection, _READ_RELATION, fields)
            before = found[0][0] if found else None
            event = self._event(through, _differences(before, relation))
            rows(self._connection, _RECORD_WATCHED_RELATION, {**fields, **event})

    def record_snapshot(
        self,
        pipeline: str,
        relation: Relation,
        position: LSN,
        copied: int,
        config: str | None = None,
        **measured: float,
    ) -> None:
        """Record the relation of a table when it was copied, the position of the copy, the number of rows,
        and the pipeline file. Raises StateError if the table is not recorded.

        :param measured: `bytes` and `seconds` of the copy, for the event
        """
        fields = {
            **_table_key(pipeline, relation.table),
            "relation": relation.to_json(),
            "position": str(position),
            "rows": copied,
            "config": config,
            **self._event(None, {"rows": copied, **measured}),
        }
        with state_errors(f"recording the snapshot of {relation.table}"):
            if not rows(self._connection, _RECORD_SNAPSHOT, fields):
                raise StateError(f"{relation.table}: not recorded as a table of pipeline {pipeline}")

    def record_verified(self, pipeline: str, record: TableRecord, through: LSN, at: datetime) -> None:
        """Record that a table was found equal to its source.

        :param record: the table's record before it was compared. Does nothing if the table was copied again
            since
        """
        fields = {
            **_table_key(pipeline, record.table),
            "through": str(through),
            "at": at,
            "snapshot_at": record.snapshot_at,
        }
        with state_errors(f"recording the verification of {record.table}"):
            rows(self._connection, _RECORD_VERIFIED, fields)

    def remove_table(self, pipeline: str, table: TableName) -> None:
        """Delete the record of a table. Does nothing if the table is not recorded."""
        with state_errors(f"removing {table}"):
            rows(self._connection, _FORGET, {**_table_key(pipeline, table), **self._event()})

    def _event(
        self, reached: LSN | None = None, details: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        """Return the parameters that only an event has.

        :param reached: the position of the table, unless its record has an LSN
        """
        return {**self._actor, "reached": text_of(reached), "details": json.dumps(details or {})}


def _differences(before: str | None, relation: Relation) -> dict[str, Any]:
    return {} if before is None else schema_changes(Relation.from_json(before), relation)


def _table_key(pipeline: str, table: TableName) -> dict[str, Any]:
    return {"pipeline": pipeline, "schema": table.schema, "table": table.name}


def _table_record(fields: tuple[Any, ...]) -> TableRecord:
    schema, name, state, error, reason, hint, lsn, since, relation, position, *_ = fields
    snapshot_at, copied, membership, config, remedy, trace, verified_through, verified_at, copying = fields[
        -9:
    ]
    return TableRecord(
        TableName(schema, name),
        TableState(state),
        error,
        reason,
        hint,
        _lsn(lsn),
        since,
        None if relation is None else Relation.from_json(relation),
        _lsn(position),
        snapshot_at,
        copied,
        membership,
        config,
        remedy and Remedy(remedy),
        trace,
        _lsn(verified_through),
        verified_at,
        read_copy_progress(state, copying),
        relation,
    )


def _lsn(text: str | None) -> LSN | None:
    return None if text is None else LSN.parse(text)


class SelectedRelations(StateConnection):
    """The relations that snapshots of pipelines selected."""

    def record_selected(self, pipeline: str, relations: Iterable[Relation]) -> None:
        """Record relations. One whose oid, table name and columns (attnums and names) are recorded already is
        not recorded again."""
        known = {(relation.oid, relation.names) for relation in self.read_selected(pipeline)}
        new = [one for one in relations if (one.oid, one.names) not in known]
        if new:
            fields = zip(*((one.oid, one.version, one.to_json()) for one in new), strict=True)
            with state_errors("recording the selected tables"):
                rows(self._connection, _ADD, (pipeline, *map(list, fields)))

    def read_selected(self, pipeline: str) -> list[Relation]:
        """Return every relation that was selected from the pipeline's source, in no order."""
        with state_errors("reading the selected tables"):
            found = rows(
                self._connection,
                "SELECT relation FROM _pgrepl.selected_relations WHERE pipeline = %s",
                (pipeline,),
            )
        return [Relation.from_json(text) for (text,) in found]
