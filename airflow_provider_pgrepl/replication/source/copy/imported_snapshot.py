"""A snapshot in a session of its own: imported, exported again, and what tables are in it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import BusyError, SnapshotError, SourceConnectionError, TableSnapshotError
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import Leaf, read_leaves
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relations
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, limit_idleness, row
from airflow_provider_pgrepl.replication.source.server_errors import source_errors


@dataclass(frozen=True)
class Shape:
    """Tables as a publication publishes them, and their leaves, by oid."""

    publication: str | None
    relations: dict[int, Relation]
    leaves: dict[int, list[Leaf]]


CONFLICT_HINT = (
    "nothing needs to be done: it is copied again. If this repeats on a standby, set hot_standby_feedback to"
    " on there, or max_standby_streaming_delay to longer than the copy of the table takes"
)


GATE_IDLE_LIMIT_S = 10
"""Shorter than that of the session that holds the lock: no copy may begin when the lock is not held."""


@dataclass(frozen=True)
class Gate:
    """A session that exports a snapshot. When it has ended, nothing can import the snapshot."""

    connection: Connection
    snapshot: str
    pid: int

    def keep_open(self) -> None:
        """Tell the server that this process does not hang. To be called every few seconds."""
        with source_errors("keeping the snapshot"):
            row(self.connection, "SELECT 1")

    def shut(self) -> None:
        """Return when nothing can import the snapshot any more. Can be called again."""
        with suppress(psycopg2.Error):
            if not self.connection.closed:
                self.connection.cursor().execute("ROLLBACK")
            self.connection.close()


def open_gate(dsn: str, snapshot: str) -> Gate:
    """Import a snapshot in a session of its own, and export it again."""
    connection = connect(dsn, "keeper")
    try:
        import_snapshot(connection, snapshot, GATE_IDLE_LIMIT_S)
        return Gate(connection, export_again(connection), connection.info.backend_pid)
    except BaseException:
        connection.close()
        raise


def lost(reason: str, kind: type[SnapshotError] = SnapshotError) -> SnapshotError:
    """Return the error of a session that kept the snapshot, and is gone."""
    return kind(
        f"the connection that kept the snapshot was lost: {reason}",
        "the copies made under it are not used: run the snapshot again",
    )


@contextmanager
def losses(kind: type[SnapshotError] = SnapshotError) -> Iterator[None]:
    """Within, a lost connection is a lost snapshot, of `kind`, in whose place another can be taken.

    What the server ended for another session, or for replay, holds for one table.
    """
    try:
        yield
    except SourceConnectionError as error:
        raise lost(error.message, kind) from None
    except BusyError as error:
        raise TableSnapshotError(error.message, CONFLICT_HINT) from None


def import_snapshot(connection: Connection, snapshot: str, idle_limit_s: float | None = None) -> None:
    """Begin a read-only transaction that sees the snapshot, with a limit as of `limit_idleness`.

    Raises SnapshotError if it is gone.
    """
    with source_errors("importing the snapshot"), connection.cursor() as cursor:
        try:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
            limit_idleness(connection, idle_limit_s)
        except (psycopg2.errors.InvalidParameterValue, psycopg2.errors.UndefinedObject):
            raise SnapshotError("the exported snapshot is gone: its connection was closed or lost") from None


def export_again(connection: Connection) -> str:
    """Return the name under which others import the snapshot of this session's transaction."""
    with source_errors("exporting the snapshot again"):
        exported: str = row(connection, "SELECT pg_catalog.pg_export_snapshot()")[0]
    return exported


def read_shape(connection: Connection, relations: Sequence[Relation], publication: str | None) -> Shape:
    """Read tables as they are in the connection's snapshot, or now."""
    oids = [relation.oid for relation in relations]
    leaves = {oid: read_leaves(connection, oid) for oid in oids}
    return Shape(publication, read_relations(connection, oids, publication), leaves)


def check_as_selected(relations: Sequence[Relation], then: Shape) -> None:
    """Raise SnapshotError if a table is not in the snapshot as it was selected.

    Settings were compared with it, by name, as it was then.
    """
    altered = sorted(
        str(relation.table)
        for relation in relations
        if relation.oid not in then.relations
        or _selected(then.relations[relation.oid]) != _selected(relation)
    )
    if altered:
        raise SnapshotError(
            f"{', '.join(altered)}: altered between the selection of the tables and the snapshot",
            "nothing needs to be done: the tables are selected again",
        )


def _selected(relation: Relation) -> tuple[object, ...]:
    """What settings are about; nothing that publishing the table changes."""
    types = {(column.attnum, column.type_oid, column.typmod, column.is_key) for column in relation.columns}
    return relation.names, relation.relkind, relation.replica_identity, types


def check_unaltered(dsn: str, relations: Sequence[Relation], then: Shape) -> None:
    """Raise SnapshotError if a table, a partition or the publication is not as it was `then`.

    After a rewriting ALTER the snapshot shows an empty table, without an error.
    """
    with closing(connect(dsn, "keeper check")) as now:
        today = read_shape(now, relations, then.publication)
    altered = sorted(
        str(relation.table)
        for relation in relations
        if relation.oid not in then.relations
        or then.relations[relation.oid] != today.relations.get(relation.oid)
        or then.relations[relation.oid].table != relation.table
        or then.leaves[relation.oid] != today.leaves[relation.oid]
    )
    if altered:
        raise SnapshotError(
            f"{', '.join(altered)}: altered after the snapshot was exported",
            "nothing needs to be done: a new snapshot is taken",
        )
