"""The exported snapshot, kept alive with its tables locked while they are copied in ranges."""

from __future__ import annotations

import logging
from types import TracebackType

import psycopg2
import psycopg2.errors

from airflow_provider_pgrepl.errors import (
    PublicationError,
    SnapshotError,
)
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.owner_code import (
    refused_code,
    shut_owners_out,
    unsafe_to_select,
)
from airflow_provider_pgrepl.replication.source.catalog.relations import (
    Leaf,
    read_leaves,
    read_relations,
)
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect,
    describe,
    row,
    source_errors,
)
from airflow_provider_pgrepl.replication.source.copy.ranges import CopyRange, plan_ranges
from airflow_provider_pgrepl.replication.source.copy.stream import open_copy
from airflow_provider_pgrepl.replication.source.copy.table_locks import lock_tables

__all__ = ["CopyRange", "Keeper", "keep", "open_copy", "plan_ranges"]

log = logging.getLogger(__name__)

Shape = tuple[dict[int, Relation], dict[int, list[Leaf]]]


class Keeper:
    """A transaction that holds a snapshot, and the tables as they are in it, until it is closed.

    Its ACCESS SHARE locks make DDL on these tables wait. `snapshot` is the name under which copies import it,
    `relations` the tables as they were in it.
    """

    def __init__(
        self,
        dsn: str,
        connection: Connection,
        snapshot: str,
        relations: list[Relation],
        *,
        trusts_owners: bool = False,
    ) -> None:
        self.connection = connection
        self.snapshot = snapshot
        self.relations = relations
        self._dsn = dsn
        self._trusts_owners = trusts_owners

    def plan(self, relation: Relation, range_bytes: int) -> list[CopyRange]:
        """`plan_ranges` within the snapshot, so that a partition attached since is not copied.

        A table whose owner could have code run by a SELECT is copied whole, which takes none. Raises
        TableError when it has such code, or cannot be copied without a SELECT.
        """
        ranges = plan_ranges(self.connection, relation, range_bytes)
        leaves = {part.leaf_oid: part.leaf for part in ranges if part.is_planned}
        if self._trusts_owners or not leaves or self._has_shut_out(relation, leaves):
            return ranges
        whole = plan_ranges(self.connection, relation, range_bytes, whole=True)
        if any(part.is_planned for part in whole):
            raise unsafe_to_select(relation.table)
        log.info(
            "%s is copied by one task for each partition: its owner could run code in a SELECT, see"
            " trust_table_owners",
            relation.table,
        )
        return whole

    def _has_shut_out(self, relation: Relation, leaves: dict[int, TableName]) -> bool:
        check = connect(self._dsn, "keeper check")
        try:
            code = shut_owners_out(self.connection, check, leaves)
            if code:
                raise refused_code(check, relation.table, [one for found in code.values() for one in found])
        finally:
            check.close()
        return code is not None

    def check(self) -> None:
        """Raises SnapshotError when the snapshot was lost, and what was copied may not be whole.

        To be asked before the copies are committed.
        """
        try:
            row(self.connection, "SELECT 1")
        except psycopg2.Error as error:
            raise SnapshotError(
                f"the connection that kept the snapshot was lost: {describe(error)}",
                "the copies made under it are not used: run the snapshot again",
            ) from None

    def close(self) -> None:
        """Let the snapshot and the locks go. May be called again."""
        self.connection.close()

    def __enter__(self) -> Keeper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep(
    dsn: str,
    snapshot: str,
    relations: list[Relation],
    publication: str | None,
    lock_timeout_s: float,
    *,
    trusts_owners: bool = False,
) -> Keeper:
    """Import an exported snapshot, lock its tables, and export it again.

    Raises SnapshotError (make a new slot and try again) when the snapshot is gone, a lock is not had in time,
    or a table, a partition or its publication was altered since the export: after a rewriting ALTER the
    snapshot would show an empty table. Raises PublicationError when a table is not in the publication at all.
    """
    connection = connect(dsn, "keeper")
    try:
        _import(connection, snapshot)
        lock_tables(connection, dsn, relations, "ACCESS SHARE", lock_timeout_s)
        then = _read_shape(connection, relations, publication)
        with_today = connect(dsn, "keeper check")
        try:
            today = _read_shape(with_today, relations, publication)
        finally:
            with_today.close()
        _compare(relations, then, today, publication)
        with source_errors("exporting the snapshot again"):
            exported = row(connection, "SELECT pg_catalog.pg_export_snapshot()")[0]
    except BaseException:
        connection.close()
        raise
    kept = [then[0][relation.oid] for relation in relations]
    return Keeper(dsn, connection, exported, kept, trusts_owners=trusts_owners)


def _import(connection: Connection, snapshot: str) -> None:
    with source_errors("importing the snapshot"), connection.cursor() as cursor:
        try:
            cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            cursor.execute("SET TRANSACTION SNAPSHOT %s", (snapshot,))
        except (psycopg2.errors.InvalidParameterValue, psycopg2.errors.UndefinedObject):
            raise SnapshotError("the exported snapshot is gone: its connection was closed or lost") from None


def _read_shape(connection: Connection, relations: list[Relation], publication: str | None) -> Shape:
    oids = [relation.oid for relation in relations]
    leaves = {oid: read_leaves(connection, oid) for oid in oids}
    return read_relations(connection, oids, publication), leaves


def _compare(relations: list[Relation], then: Shape, today: Shape, publication: str | None) -> None:
    altered = sorted(
        str(relation.table)
        for relation in relations
        if relation.oid not in then[0]
        or then[0][relation.oid] != today[0].get(relation.oid)
        or then[0][relation.oid].table != relation.table
        or then[1][relation.oid] != today[1][relation.oid]
    )
    if altered:
        raise SnapshotError(
            f"{', '.join(altered)}: altered after the snapshot was exported",
            "a new snapshot will do; no DDL should run on these tables while they are copied",
        )
    outside = sorted(str(found.table) for found in then[0].values() if not found.membership_oid)
    if publication is not None and outside:
        raise PublicationError(f"{', '.join(outside)}: not in publication {publication}")
