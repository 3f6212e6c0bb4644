"""The import and re-export of a snapshot by another session, and the tables' definitions in a snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import Literal

import psycopg2.errors

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    BusyError,
    SnapshotError,
    SourceConnectionError,
    TableSnapshotError,
    one_line,
)
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect,
    limit_idleness,
    row,
    rows,
)
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors

_ON_STANDBY = (
    "If this repeats on a standby, set hot_standby_feedback to on there, or max_standby_streaming_delay to"
    " longer than the copy of the table takes"
)
CONFLICT_HINT = f"the table is copied again automatically. {_ON_STANDBY}"
WAITER_HINT = (
    "the table is copied again automatically. If this repeats, run the snapshot when no DDL runs on the table"
)
_SELECTED_AGAIN_HINT = "the tables are selected again automatically"
_NEW_SNAPSHOT_HINT = "a new snapshot is taken automatically"
_AUTOMATIC = frozenset({CONFLICT_HINT, WAITER_HINT, _SELECTED_AGAIN_HINT, _NEW_SNAPSHOT_HINT})
_GIVEN_UP_TABLE = (
    f"wait until the statement of the other session has ended, then {errors.RESNAPSHOT}. {_ON_STANDBY}"
)
_GIVEN_UP_RUN = "run the command again when no DDL runs on the tables"
GATE_IDLE_LIMIT_S = 10
"""Shorter than the idle limit of the session that holds the lock: no copy may begin without the lock."""
Mode = Literal["ACCESS SHARE", "SHARE ROW EXCLUSIVE"]
_CONFLICTING_MODES: dict[Mode, tuple[str, ...]] = {
    "ACCESS SHARE": ("AccessExclusiveLock",),
    "SHARE ROW EXCLUSIVE": (
        "RowExclusiveLock",
        "ShareUpdateExclusiveLock",
        "ShareLock",
        "ShareRowExclusiveLock",
        "ExclusiveLock",
        "AccessExclusiveLock",
    ),
}
# A session that waits for a lock blocks as well: locks are granted in the order of the requests.
_HOLDERS = """
SELECT pg_catalog.format('pid %%s (%%s, %%s, in its transaction since %%s)', a.pid,
           coalesce(a.usename, 'unknown user'), coalesce(nullif(a.application_name, ''), a.backend_type),
           coalesce(a.xact_start::timestamptz(0)::text, 'unknown'))
FROM pg_catalog.pg_locks l JOIN pg_catalog.pg_stat_activity a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.relation = ANY (%(oids)s::oid[]) AND l.mode = ANY (%(modes)s)
    AND l.database = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())
    AND NOT l.pid = ANY (%(ours)s)
UNION
SELECT pg_catalog.format('prepared transaction %%L (since %%s)', p.gid, p.prepared::timestamptz(0)::text)
FROM pg_catalog.pg_locks l
    JOIN pg_catalog.pg_prepared_xacts p ON l.virtualtransaction = '-1/' || p.transaction::text
WHERE l.locktype = 'relation' AND l.relation = ANY (%(oids)s::oid[]) AND l.mode = ANY (%(modes)s)
    AND p.database = pg_catalog.current_database()
"""


@dataclass(frozen=True)
class PublishedTables:
    """The definitions of tables as a publication publishes them, and their leaves, by oid."""

    publication: str | None
    relations: dict[int, Relation]
    leaves: dict[int, list[Leaf]]


@dataclass(frozen=True)
class SnapshotExporter:
    """A session that exports a snapshot. After it has ended, no session can import the snapshot."""

    connection: Connection
    snapshot: str
    pid: int

    def keep_open(self) -> None:
        """Run a statement, so that the server does not end the idle session. Call it every few seconds."""
        with source_errors("keeping the snapshot"):
            row(self.connection, "SELECT 1")

    def shut(self) -> None:
        """End the session, so that no session can import the snapshot any more. Can be called again."""
        with suppress(psycopg2.Error):
            if not self.connection.closed:
                self.connection.cursor().execute("ROLLBACK")
            self.connection.close()


def open_gate(dsn: str, snapshot: str) -> SnapshotExporter:
    """Import a snapshot in a new session, and export it again."""
    connection = connect(dsn, "keeper")
    try:
        import_snapshot(connection, snapshot, GATE_IDLE_LIMIT_S)
        return SnapshotExporter(connection, export_again(connection), connection.info.backend_pid)
    except BaseException:
        connection.close()
        raise


def lost(reason: str, kind: type[SnapshotError] = SnapshotError) -> SnapshotError:
    """Return the error for a lost session that held the snapshot."""
    return kind(
        f"the connection that kept the snapshot was lost: {reason}",
        "the copies made under it are not used: run the snapshot again",
    )


def given_up(error: SnapshotError) -> SnapshotError:
    """Return the error of a copy that is not repeated any more.

    Its hint no longer says that the copy is repeated automatically.
    """
    if error.hint not in _AUTOMATIC:
        return error
    is_of_table = isinstance(error, TableSnapshotError)
    return type(error)(error.message, _GIVEN_UP_TABLE if is_of_table else _GIVEN_UP_RUN)


@contextmanager
def losses(kind: type[SnapshotError] = SnapshotError) -> Iterator[None]:
    """Translate a lost connection in the block into the error of a lost snapshot, of class `kind`.

    If the server ended a transaction for another session, or for replay, only one table is affected: raises
    TableSnapshotError.
    """
    try:
        yield
    except SourceConnectionError as error:
        raise lost(error.message, kind) from None
    except BusyError as error:
        raise TableSnapshotError(error.message, CONFLICT_HINT) from None


def import_snapshot(connection: Connection, snapshot: str, idle_limit_s: float | None = None) -> None:
    """Begin a read-only transaction that sees the snapshot, with an idle limit in seconds.

    `idle_limit_s`: see `limit_idleness`. Raises SnapshotError if the snapshot no longer exists.
    """
    with source_errors("importing the snapshot"), connection.cursor() as cursor:
        try:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            limit_idleness(connection, idle_limit_s)
        except (psycopg2.errors.InvalidParameterValue, psycopg2.errors.UndefinedObject):
            raise SnapshotError(
                "the exported snapshot no longer exists: its connection was closed or lost"
            ) from None


def export_again(connection: Connection) -> str:
    """Export the snapshot of this session's transaction, and return its name."""
    with source_errors("exporting the snapshot again"):
        exported: str = row(connection, "SELECT pg_catalog.pg_export_snapshot()")[0]
    return exported


def read_definitions(
    connection: Connection, relations: Sequence[Relation], publication: str | None
) -> PublishedTables:
    """Read the definitions of tables as of the connection's snapshot, or as of now without one.

    They have the names in the pipeline that `relations` have.
    """
    oids = [relation.oid for relation in relations]
    leaves = {oid: read_leaves(connection, oid) for oid in oids}
    found = read_relations(connection, oids, publication)
    named = {one.oid: found[one.oid].followed_as(one.table) for one in relations if one.oid in found}
    return PublishedTables(publication, named, leaves)


def check_as_selected(relations: Sequence[Relation], in_snapshot: PublishedTables) -> None:
    """Raise SnapshotError if a table differs in the snapshot from what was selected.

    The settings were compared, by name, with the table as it was selected.
    """
    altered = sorted(
        str(relation.table)
        for relation in relations
        if relation.oid not in in_snapshot.relations
        or _selected(in_snapshot.relations[relation.oid]) != _selected(relation)
    )
    if altered:
        raise SnapshotError(
            f"{', '.join(altered)}: altered between the selection of the tables and the snapshot",
            _SELECTED_AGAIN_HINT,
        )


def _selected(relation: Relation) -> tuple[object, ...]:
    """Return the parts of a table that settings depend on. Publishing the table changes none of them."""
    types = {(column.attnum, column.type_oid, column.typmod, column.is_key) for column in relation.columns}
    return relation.source_table, relation.names, relation.relkind, relation.replica_identity, types


def check_unaltered(dsn: str, relations: Sequence[Relation], in_snapshot: PublishedTables) -> None:
    """Raise SnapshotError if a table, a partition or the publication now differs from `in_snapshot`.

    After an ALTER that rewrites a table, the snapshot shows an empty table, without an error.
    """
    with closing(connect(dsn, "keeper check")) as now:
        today = read_definitions(now, relations, in_snapshot.publication)
    altered = sorted(
        str(relation.table)
        for relation in relations
        if relation.oid not in in_snapshot.relations
        or in_snapshot.relations[relation.oid] != today.relations.get(relation.oid)
        or in_snapshot.relations[relation.oid].source_table != relation.source_table
        or in_snapshot.leaves[relation.oid] != today.leaves[relation.oid]
    )
    if altered:
        raise SnapshotError(
            f"{', '.join(altered)}: altered after the snapshot was exported",
            _NEW_SNAPSHOT_HINT,
        )


def lock_tables(
    connection: Connection, dsn: str, relations: Sequence[Relation], timeout_s: float = 0
) -> None:
    """Lock tables and all their partitions against DDL in the current transaction, without waiting.

    `timeout_s`: the seconds for which the caller retries, for the message. Raises as `lock_errors` does.
    """
    if relations:
        with (
            source_errors("locking the tables"),
            lock_errors(connection, dsn, relations, "ACCESS SHARE", timeout_s),
            connection.cursor() as cursor,
        ):
            cursor.execute(lock_command(relations, "ACCESS SHARE") + " NOWAIT")


def lock_command(relations: Iterable[Relation], mode: Mode) -> str:
    """Return the LOCK TABLE command for tables with all their partitions."""
    # Without ONLY, a lock includes partitions, and also children by inheritance, which are separate tables.
    names = ((one.source_table.sql, one.relkind) for one in relations)
    listed = (name if relkind == "p" else f"ONLY {name}" for name, relkind in names)
    return f"LOCK TABLE {', '.join(listed)} IN {mode} MODE"


@contextmanager
def lock_errors(
    connection: Connection, dsn: str, relations: Sequence[Relation], mode: Mode, timeout_s: float
) -> Iterator[None]:
    """Raise SnapshotError if `connection` does not get a lock, or a table no longer exists.

    The error names the blocking sessions.
    """
    try:
        yield
    except (psycopg2.errors.LockNotAvailable, psycopg2.errors.QueryCanceled):
        raise SnapshotError(
            f"{', '.join(str(relation.table) for relation in relations)}: could not be locked ({mode})"
            f" within {timeout_s:g} s, because of {_holders(connection, dsn, relations, mode)}",
            "run the command again when these sessions have ended, or raise lock_timeout_s",
        ) from None
    except psycopg2.errors.DeadlockDetected:
        raise SnapshotError(
            "the tables were not locked: other sessions deadlocked with this one", "run the command again"
        ) from None
    except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName) as error:
        raise SnapshotError(
            f"a table was dropped or renamed before it was locked: {describe(error)}", "run the command again"
        ) from None


def _holders(connection: Connection, dsn: str, relations: Iterable[Relation], mode: Mode) -> str:
    """Return the sessions that hold or wait for a conflicting lock. Called right after the wait has ended."""
    control = connect(dsn, "who blocks")
    try:
        oids = {leaf.oid for relation in relations for leaf in read_leaves(control, relation.oid)}
        oids |= {relation.oid for relation in relations}
        found = rows(
            control,
            _HOLDERS,
            {
                "oids": sorted(oids),
                "modes": list(_CONFLICTING_MODES[mode]),
                "ours": [connection.info.backend_pid, control.info.backend_pid],
            },
        )
    finally:
        control.close()
    return "; ".join(one_line(text) for (text,) in found) or "a session that has released it since"
