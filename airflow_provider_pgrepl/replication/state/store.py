"""The store of intent, table states and progress: schema `_pgrepl` in PostgreSQL.

Every method is one short autocommit statement, so that nothing here ever holds back the source's vacuum.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Any, Literal, NoReturn

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import ConfigError, SlotBusyError, StateError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lsn import LSN
from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source.connection import connect, row, rows, source_errors
from airflow_provider_pgrepl.replication.state import migrations
from airflow_provider_pgrepl.replication.state.progress import Progress
from airflow_provider_pgrepl.replication.state.table_state import (
    TableState,
    check_transition,
    states_before,
)

Purpose = Literal["replicate", "snapshot"]

_REGISTER = """
INSERT INTO _pgrepl.pipelines AS p
    (name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config)
VALUES (%(name)s, %(system_identifier)s, %(slot)s, %(publication)s, %(slot_owned)s, %(publication_owned)s,
        %(lake)s, %(config)s)
ON CONFLICT (name) DO UPDATE SET
    system_identifier = excluded.system_identifier, slot = excluded.slot, publication = excluded.publication,
    slot_owned = excluded.slot_owned, publication_owned = excluded.publication_owned, lake = excluded.lake,
    config = excluded.config
WHERE %(replace)s OR (p.system_identifier, p.slot, p.lake)
    = (excluded.system_identifier, excluded.slot, excluded.lake)
RETURNING 1
"""

_PIPELINE = """
SELECT name, system_identifier, slot, publication, slot_owned, publication_owned, lake, config::text,
    created_at
FROM _pgrepl.pipelines
"""

_HOLDER = """
SELECT a.application_name, a.pid, coalesce(pg_catalog.host(a.client_addr), 'no address'),
    a.backend_start::timestamptz(0)::text
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND (l.classid::bigint << 32 | l.objid::bigint) = %s
"""

_SET_STATE = """
UPDATE _pgrepl.tables SET state = %(state)s, reason = %(reason)s, hint = %(hint)s, lsn = %(lsn)s::pg_lsn,
    since = CASE WHEN state = %(state)s THEN since ELSE now() END
WHERE pipeline = %(pipeline)s AND schema_name = %(schema)s AND table_name = %(table)s
    AND state = ANY (%(before)s)
RETURNING 1
"""

_ADD_PENDING = """
INSERT INTO _pgrepl.tables (pipeline, schema_name, table_name, state, reason, hint, lsn)
VALUES (%(pipeline)s, %(schema)s, %(table)s, %(state)s, %(reason)s, %(hint)s, %(lsn)s::pg_lsn)
ON CONFLICT DO NOTHING RETURNING 1
"""

_TABLES = """
SELECT schema_name, table_name, state, reason, hint, lsn::text, since, relation, position_lsn::text,
    snapshot_at, rows_copied
FROM _pgrepl.tables WHERE pipeline = %s ORDER BY schema_name, table_name
"""

_RECORD_SNAPSHOT = """
UPDATE _pgrepl.tables SET relation = %(relation)s, position_lsn = %(position)s::pg_lsn, snapshot_at = now(),
    rows_copied = %(rows)s
WHERE pipeline = %(pipeline)s AND schema_name = %(schema)s AND table_name = %(table)s RETURNING 1
"""

_WRITE_PROGRESS = """
INSERT INTO _pgrepl.progress AS p (pipeline, received_lsn, durable_lsn, told_lsn, applied_lsn,
    applied_commit_ts, changes_per_s, holder)
VALUES (%(pipeline)s,
    coalesce(%(received)s::pg_lsn, '0/0'), coalesce(%(durable)s::pg_lsn, '0/0'),
    coalesce(%(told)s::pg_lsn, '0/0'), coalesce(%(applied)s::pg_lsn, '0/0'),
    %(applied_ts)s::timestamptz, coalesce(%(rate)s::float8, 0), coalesce(%(holder)s::text, ''))
ON CONFLICT (pipeline) DO UPDATE SET
    received_lsn = coalesce(%(received)s::pg_lsn, p.received_lsn),
    durable_lsn = coalesce(%(durable)s::pg_lsn, p.durable_lsn),
    told_lsn = coalesce(%(told)s::pg_lsn, p.told_lsn),
    applied_lsn = coalesce(%(applied)s::pg_lsn, p.applied_lsn),
    applied_commit_ts = coalesce(%(applied_ts)s::timestamptz, p.applied_commit_ts),
    changes_per_s = coalesce(%(rate)s::float8, p.changes_per_s),
    holder = coalesce(%(holder)s::text, p.holder),
    updated_at = now()
"""

_PROGRESS = """
SELECT received_lsn::text, durable_lsn::text, told_lsn::text, applied_lsn::text, applied_commit_ts,
    changes_per_s, holder, updated_at
FROM _pgrepl.progress WHERE pipeline = %s
"""


@dataclass(frozen=True)
class PipelineRecord:
    """What is recorded of a pipeline: its source, what it owns there, its lake, its last configuration."""

    name: str
    system_identifier: str
    slot: str
    publication: str
    slot_owned: bool
    publication_owned: bool
    lake: str
    config: str
    created_at: datetime


@dataclass(frozen=True)
class TableRecord:
    """What is recorded of a table.

    `lsn` is where an error happened; `relation`, `position_lsn`, `snapshot_at` and `rows_copied` are of the
    last snapshot.
    """

    table: TableName
    state: TableState
    reason: str
    hint: str
    lsn: LSN | None
    since: datetime
    relation: Relation | None
    position_lsn: LSN | None
    snapshot_at: datetime | None
    rows_copied: int | None


class Store:
    """A connection to the state database. Its advisory locks last as long as it does.

    Raises SourceConnectionError when the database cannot be reached or the connection is lost, and StateError
    when the schema is missing.
    """

    def __init__(self, dsn: str, role: str) -> None:
        self._connection = connect(dsn, role)

    def close(self) -> None:
        """Close the connection, and so release the locks. May be called again."""
        self._connection.close()

    def __enter__(self) -> Store:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def migrate(self) -> None:
        """Set the schema up, or bring it to this version; see `migrations.migrate`."""
        migrations.migrate(self._connection)

    def register(
        self,
        pipeline: Pipeline,
        system_identifier: str,
        slot_owned: bool,
        publication_owned: bool,
        *,
        replace: bool = False,
    ) -> None:
        """Record the pipeline and what it owns; again with the same source, slot and lake it is an update.

        Raises ConfigError when slot, publication or lake are recorded for another pipeline, by whose name it
        is called; StateError when this one is recorded with another source, slot or lake and not `replace`.
        """
        fields = {
            "name": pipeline.name,
            "system_identifier": system_identifier,
            "slot": pipeline.slot,
            "publication": pipeline.publication,
            "slot_owned": slot_owned,
            "publication_owned": publication_owned,
            "lake": pipeline.lake_root,
            "config": pipeline.to_json(),
            "replace": replace,
        }
        with _state_errors("recording the pipeline"):
            try:
                found = rows(self._connection, _REGISTER, fields)
            except psycopg2.errors.UniqueViolation as error:
                self._refuse_strangers(pipeline, system_identifier, error.diag.constraint_name or "")
        if not found:
            self._refuse_change(pipeline, system_identifier)

    def read_pipeline(self, name: str) -> PipelineRecord | None:
        """The recorded pipeline; None when there is none of this name."""
        with _state_errors("reading the pipeline"):
            found = rows(self._connection, _PIPELINE + " WHERE name = %s", (name,))
        return PipelineRecord(*found[0]) if found else None

    def lock(self, pipeline: str, purpose: Purpose) -> None:
        """Take the pipeline's lock for this purpose until `unlock` or `close`.

        Raises SlotBusyError naming the holder. Polite only: what stops a second writer is in the lake.
        """
        name = f"pgrepl {purpose} {pipeline} {socket.gethostname()}:{os.getpid()}"
        key = _lock_key(pipeline, purpose)
        with _state_errors("taking the pipeline's lock"):
            row(self._connection, "SELECT pg_catalog.set_config('application_name', %s, false)", (name[:63],))
            taken = row(self._connection, "SELECT pg_catalog.pg_try_advisory_lock(%s)", (key,))[0]
            holders = [] if taken else rows(self._connection, _HOLDER, (key,))
        if not taken:
            who = "; ".join(
                f"{application} (database pid {pid}, from {address}, since {since})"
                for application, pid, address, since in holders
            )
            raise SlotBusyError(
                f"pipeline {pipeline}: another process does {purpose} already: {who or 'it has just ended'}",
                "stop it first, or wait until it has ended",
            )

    def unlock(self, pipeline: str, purpose: Purpose) -> None:
        """Release a lock that `lock` took."""
        with _state_errors("releasing the pipeline's lock"):
            row(self._connection, "SELECT pg_catalog.pg_advisory_unlock(%s)", (_lock_key(pipeline, purpose),))

    def read_tables(self, pipeline: str) -> dict[TableName, TableRecord]:
        """All recorded tables of a pipeline, by name."""
        with _state_errors("reading the tables"):
            found = [_table_record(fields) for fields in rows(self._connection, _TABLES, (pipeline,))]
        return {record.table: record for record in found}

    def set_state(
        self,
        pipeline: str,
        table: TableName,
        state: TableState,
        *,
        reason: str = "",
        hint: str = "",
        lsn: LSN | None = None,
    ) -> None:
        """Put a table into a state. Raises StateError when it may not follow the present one."""
        fields = {
            **_table_key(pipeline, table),
            "state": state.value,
            "reason": reason,
            "hint": hint,
            "lsn": _text(lsn),
            "before": [before.value for before in states_before(state)],
        }
        with _state_errors(f"setting the state of {table}"):
            changed = rows(self._connection, _SET_STATE, fields)
            if not changed and state is TableState.PENDING:
                changed = rows(self._connection, _ADD_PENDING, fields)
        if not changed:
            record = self.read_tables(pipeline).get(table)
            check_transition(record.state if record else None, state, str(table))
            raise StateError(f"{table}: its state was changed by another process at the same time")

    def record_snapshot(self, pipeline: str, relation: Relation, position: LSN, copied: int) -> None:
        """Record what a table was when it was copied, and the position of the copy."""
        fields = {
            **_table_key(pipeline, relation.table),
            "relation": relation.to_json(),
            "position": str(position),
            "rows": copied,
        }
        with _state_errors(f"recording the snapshot of {relation.table}"):
            if not rows(self._connection, _RECORD_SNAPSHOT, fields):
                raise StateError(f"{relation.table}: not recorded as a table of pipeline {pipeline}")

    def remove_table(self, pipeline: str, table: TableName) -> None:
        """Forget a table; one that is not recorded is as good as forgotten."""
        with _state_errors(f"removing {table}"):
            rows(
                self._connection,
                "DELETE FROM _pgrepl.tables WHERE pipeline = %(pipeline)s AND schema_name = %(schema)s"
                " AND table_name = %(table)s RETURNING 1",
                _table_key(pipeline, table),
            )

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
    ) -> None:
        """Record what is given and leave the rest: the receiver and the applier each know a part."""
        fields = {
            "pipeline": pipeline,
            "received": _text(received_lsn),
            "durable": _text(durable_lsn),
            "told": _text(told_lsn),
            "applied": _text(applied_lsn),
            "applied_ts": applied_commit_ts,
            "rate": changes_per_s,
            "holder": holder,
        }
        with _state_errors("writing progress"), self._connection.cursor() as cursor:
            cursor.execute(_WRITE_PROGRESS, fields)

    def read_progress(self, pipeline: str) -> Progress | None:
        """The last progress written; None when there was none yet."""
        with _state_errors("reading progress"):
            found = rows(self._connection, _PROGRESS, (pipeline,))
        if not found:
            return None
        *positions, commit_ts, rate, holder, updated_at = found[0]
        received, durable, told, applied = (LSN.parse(position) for position in positions)
        return Progress(received, durable, told, applied, commit_ts, rate, holder, updated_at)

    def _refuse_strangers(self, pipeline: Pipeline, system_identifier: str, constraint: str) -> NoReturn:
        what, condition, values = {
            "pipelines_lake": (f"lake {pipeline.lake_root}", "lake = %s", (pipeline.lake_root,)),
            "pipelines_slot": (
                f"slot {pipeline.slot}",
                "system_identifier = %s AND slot = %s",
                (system_identifier, pipeline.slot),
            ),
            "pipelines_publication": (
                f"publication {pipeline.publication}",
                "system_identifier = %s AND publication = %s AND publication_owned",
                (system_identifier, pipeline.publication),
            ),
        }[constraint]
        found = rows(self._connection, f"{_PIPELINE} WHERE {condition}", values)
        owner = f"pipeline {found[0][0]}" if found else "another pipeline"
        raise ConfigError(f"{what} belongs to {owner}", f"give pipeline {pipeline.name} one of its own")

    def _refuse_change(self, pipeline: Pipeline, system_identifier: str) -> NoReturn:
        recorded = self.read_pipeline(pipeline.name)
        pairs = (
            ("source system identifier", system_identifier, recorded and recorded.system_identifier),
            ("slot", pipeline.slot, recorded and recorded.slot),
            ("lake", pipeline.lake_root, recorded and recorded.lake),
        )
        changed = ", ".join(f"{what} {old} (now {new})" for what, new, old in pairs if new != old)
        raise StateError(
            f"pipeline {pipeline.name} is recorded with {changed}",
            "give this pipeline another name, or take everything anew: snapshot app with --new-epoch",
        )


@contextmanager
def _state_errors(doing: str) -> Iterator[None]:
    with source_errors(f"state: {doing}"):
        try:
            yield
        except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName):
            raise StateError(
                f"state: {doing}: schema _pgrepl is not set up in this database", "run the snapshot app first"
            ) from None
        except psycopg2.errors.ForeignKeyViolation:
            raise StateError(
                f"state: {doing}: the pipeline is not recorded", "run the snapshot app first"
            ) from None
        except psycopg2.errors.ReadOnlySqlTransaction:
            raise StateError(
                f"state: {doing}: the database is read-only",
                "give another database for it: state_conn_id, or PGREPL_STATE_DSN",
            ) from None


def _lock_key(pipeline: str, purpose: str) -> int:
    digest = hashlib.blake2b(f"pgrepl {purpose} {pipeline}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _table_key(pipeline: str, table: TableName) -> dict[str, Any]:
    return {"pipeline": pipeline, "schema": table.schema, "table": table.name}


def _text(lsn: LSN | None) -> str | None:
    return None if lsn is None else str(lsn)


def _table_record(fields: tuple[Any, ...]) -> TableRecord:
    schema, name, state, reason, hint, lsn, since, relation, position, snapshot_at, copied = fields
    return TableRecord(
        table=TableName(schema, name),
        state=TableState(state),
        reason=reason,
        hint=hint,
        lsn=LSN.parse(lsn) if lsn else None,
        since=since,
        relation=Relation.from_json(relation) if relation else None,
        position_lsn=LSN.parse(position) if position else None,
        snapshot_at=snapshot_at,
        rows_copied=copied,
    )
