"""The sessions that hold a snapshot: one for all tables, and one per table that locks it during its copy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

from airflow_provider_pgrepl.errors import (
    BusyError,
    PublicationError,
    SnapshotError,
    SourceConnectionError,
    SourceError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.owner_code import (
    let_owners_in,
    refused_code,
    shut_owners_out,
    unsafe_to_select,
)
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.short_waits import with_short_waits
from airflow_provider_pgrepl.replication.source.slot_creation import ExportedSnapshot

from .copy_stream import CopiedRange, CopyRange, Sample, open_copy, plan_ranges
from .imported_snapshot import (
    PublishedTables,
    SnapshotExporter,
    check_as_selected,
    check_unaltered,
    export_again,
    import_snapshot,
    lock_tables,
    losses,
    lost,
    open_gate,
    read_definitions,
)
from .lock_watch import LockWatch

log = logging.getLogger(__name__)

T = TypeVar("T")
_LOCK_TRIES_S = 0.9
MOST_LOANS = 20
"""The most times that a table's lock against code of its owner is lent during its copy."""
__all__ = ["CopyRange", "SnapshotHolder", "keep", "keep_for", "open_copy", "plan_ranges"]
_XMIN = "SELECT pg_catalog.pg_snapshot_xmin(pg_catalog.pg_current_snapshot())::text"
_OF_TABLE = 3
"""The sessions of a table during its copy: its keeper, the gate, and briefly one that reads the catalog."""
# `reserved_connections` exists from PostgreSQL 16 on. Walsenders have connection slots of their own.
_FREE = """
SELECT pg_catalog.current_setting('max_connections')::int
        - pg_catalog.current_setting('superuser_reserved_connections')::int
        - coalesce(pg_catalog.current_setting('reserved_connections', true)::int, 0)
        - (SELECT coalesce(sum(numbackends), 0)::int FROM pg_catalog.pg_stat_database),
    (SELECT d.datconnlimit - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity a
            WHERE a.datid = d.oid AND a.backend_type IS DISTINCT FROM 'walsender')::int
        FROM pg_catalog.pg_database d
        WHERE d.datname = pg_catalog.current_database() AND d.datconnlimit >= 0 AND NOT r.rolsuper),
    CASE WHEN r.rolconnlimit >= 0 AND NOT r.rolsuper THEN r.rolconnlimit
        - (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_activity a
            WHERE a.usesysid = r.oid AND a.backend_type IS DISTINCT FROM 'walsender')::int END
FROM pg_catalog.pg_roles r WHERE r.rolname = session_user
"""


class TableSnapshotHolder:
    """A transaction that holds the snapshot, and an ACCESS SHARE lock on one table and its partitions.

    The table's copies import the snapshot under the name `snapshot`, from the session `gate`, which ends
    before the lock is released. So a copy that has locked the table, and then imports the snapshot, reads the
    table as it was, and runs no code that its owner adds later.

    As soon as a session of the source waits for the table, the locks are released: running copies are ended,
    and `check` raises.
    """

    def __init__(
        self,
        dsn: str,
        connection: Connection,
        kept: str,
        gate: SnapshotExporter,
        relation: Relation,
        lock_timeout_s: float,
        *,
        trusts_owners: bool,
    ) -> None:
        self.connection = connection
        self.snapshot = gate.snapshot
        self.relation = relation
        self._dsn = dsn
        self._kept = kept
        self._lock_timeout_s = lock_timeout_s
        self._trusts_owners = trusts_owners
        self._leaves: dict[int, TableName] = {}
        self._loans = 0
        self._watch = LockWatch(connection, str(relation.table), TableSnapshotError, gate, let_owners_in)
        self._watch.start()

    def xmin(self) -> int:
        """Return the snapshot's xmin, with the epoch of transaction IDs. Raises TableSnapshotError if the
        connection is lost."""
        try:
            with losses(TableSnapshotError), source_errors("reading the snapshot"):
                return int(row(self.connection, _XMIN)[0])
        finally:
            self._watch.raise_failure()

    def plan(
        self,
        relation: Relation,
        range_bytes: int,
        sample: Sample | None = None,
        *,
        selects: bool = False,
        copied: Sequence[CopiedRange] = (),
    ) -> list[CopyRange]:
        """Return the ranges of `plan_ranges` in the snapshot, without partitions attached since.

        If the table's owner could add code that a SELECT runs, each leaf is one range, which needs no SELECT.
        Raises TableError if the table has such code, or cannot be copied without a SELECT;
        TableSnapshotError if the connection is lost.
        """
        try:
            with losses(TableSnapshotError):
                return self._plan(relation, range_bytes, sample, copied, selects=selects)
        finally:
            # If the locks were released early, raise that error: later results and errors are meaningless.
            self._watch.raise_failure()

    def _plan(
        self,
        relation: Relation,
        range_bytes: int,
        sample: Sample | None,
        copied: Sequence[CopiedRange],
        *,
        selects: bool,
    ) -> list[CopyRange]:
        ranges = plan_ranges(
            self.connection, relation, range_bytes, sample=sample, selects=selects, copied=copied
        )
        leaves = {part.leaf_oid: part.leaf for part in ranges if part.is_planned}
        if self._trusts_owners or not leaves or self._can_shut_out(leaves):
            self._leaves = leaves
            return ranges
        whole = plan_ranges(
            self.connection, relation, range_bytes, whole=True, sample=sample, selects=selects
        )
        if any(part.is_planned for part in whole):
            raise unsafe_to_select(relation.table)
        log.info(
            "%s is copied by one task for each partition: its owner could run code in a SELECT, see"
            " trust_table_owners",
            relation.table,
        )
        return whole

    def _can_shut_out(self, leaves: dict[int, TableName]) -> bool:
        def attempt(_: float) -> bool:
            with self._watch.turn:
                self._watch.raise_failure()
                return self._has_shut_out(leaves)

        try:
            return with_short_waits(attempt, _LOCK_TRIES_S, BusyError)
        except BusyError:
            return False

    def _has_shut_out(self, leaves: dict[int, TableName]) -> bool:
        check = connect(self._dsn, "keeper check")
        try:
            code = shut_owners_out(self.connection, check, leaves)
            if code:
                found = [one for of_leaf in code.values() for one in of_leaf]
                raise refused_code(check, self.relation.table, found)
        finally:
            check.close()
        return code is not None

    def check(self) -> None:
        """Raise TableSnapshotError if the locks were released early, or the connection was lost.

        The copied rows must not be used then. Called before the copies are committed.
        """
        self._watch.check()

    def renew(self) -> bool:
        """Take back the lock that was lent to a statement, so that copies can begin under a new `snapshot`.

        Return False if the lock was not lent. Raises TableSnapshotError if the lock is not acquired in time,
        or was lent more than MOST_LOANS times; TableError if the owner has added code.
        """
        if not self._watch.is_lent:
            return False
        self._loans += 1
        if self._loans > MOST_LOANS:
            raise TableSnapshotError(
                f"{self.relation.table}: statements of other sessions needed its lock {MOST_LOANS} times"
                " while it was copied",
                "run the snapshot when the table is not analyzed, vacuumed or altered",
            )
        with losses(TableSnapshotError):
            with_short_waits(lambda _: self._take_back(), self._lock_timeout_s, BusyError)
        return True

    def _take_back(self) -> None:
        with self._watch.turn:
            self._watch.raise_failure()
            try:
                is_shut = self._has_shut_out(self._leaves)
            except BusyError:
                raise BusyError(
                    f"{self.relation.table}: another session holds the lock that it was lent"
                ) from None
            if not is_shut:
                raise TableSnapshotError(f"{self.relation.table}: the role may not lock it any more")
            gate = open_gate(self._dsn, self._kept)
            self.snapshot = gate.snapshot
            self._watch.resume(gate)

    def close(self) -> None:
        """Release the lock. Can be called again."""
        self._watch.close()

    def __enter__(self) -> TableSnapshotHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def keep_table(
    dsn: str,
    snapshot: str,
    relation: Relation,
    then: PublishedTables,
    lock_timeout_s: float,
    *,
    trusts_owners: bool,
) -> TableSnapshotHolder:
    """Import a snapshot in a new session, lock the table, and export the snapshot again.

    Raises TableSnapshotError if the lock is not acquired in time or the table differs from `then`;
    SnapshotError if the snapshot no longer exists.
    """
    connection = connect(dsn, "keeper")

    def attempt(_: float) -> None:
        # Do not wait for one partition's lock while holding others: a transaction that locks them as well
        # could fail because of a deadlock.
        import_snapshot(connection, snapshot)
        try:
            lock_tables(connection, dsn, [relation], lock_timeout_s)
        except SnapshotError as error:
            if not connection.closed:
                with source_errors("ending the transaction of the keeper"):
                    connection.cursor().execute("ROLLBACK")
            raise TableSnapshotError(error.message, error.hint) from None

    try:
        with_short_waits(attempt, lock_timeout_s, TableSnapshotError)
        try:
            check_unaltered(dsn, [relation], then)
        except SnapshotError as error:
            raise TableSnapshotError(error.message, error.hint) from None
        gate = open_gate(dsn, snapshot)
    except BaseException:
        connection.close()
        raise
    return TableSnapshotHolder(
        dsn,
        connection,
        snapshot,
        gate,
        relation,
        lock_timeout_s,
        trusts_owners=trusts_owners,
    )


@dataclass(frozen=True)
class CopySessions:
    """The number of tables that are copied at the same time, and of ranges of each."""

    tables: int
    ranges: int


class SnapshotHolder:
    """A transaction that holds a snapshot until it is closed.

    `snapshot`: the name under which it is imported. `relations`: the tables as of the snapshot. The
    transaction locks no table; `hold` locks each table for its copy. As soon as a session of the source waits
    for the transaction's end, as CREATE INDEX CONCURRENTLY on any table does, the snapshot is released, and
    `hold`, `read` and `sessions` raise SnapshotError.
    """

    def __init__(
        self,
        dsn: str,
        connection: Connection,
        snapshot: str,
        relations: list[Relation],
        then: PublishedTables,
        lock_timeout_s: float,
        *,
        trusts_owners: bool = False,
    ) -> None:
        self.connection = connection
        self.snapshot = snapshot
        self.relations = relations
        self._dsn = dsn
        self._then = then
        self._lock_timeout_s = lock_timeout_s
        self._trusts_owners = trusts_owners
        self._watch = LockWatch(connection, "the snapshot")

    def hold(self, relation: Relation) -> TableSnapshotHolder:
        """Lock a table as of the snapshot, in a new session.

        Raises TableSnapshotError if the table was altered since the export, or the lock is not acquired in
        time: the table needs a new snapshot. Raises SnapshotError if the snapshot no longer exists.
        """
        if self._watch.failure is not None:
            raise self._watch.failure
        with losses():
            return keep_table(
                self._dsn,
                self.snapshot,
                relation,
                self._then,
                self._lock_timeout_s,
                trusts_owners=self._trusts_owners,
            )

    def read(self, reader: Callable[[Connection], T]) -> T:
        """Return what `reader` reads over the connection, in the snapshot.

        Raises SnapshotError if the snapshot was released early, or the connection is lost.
        """
        # The watch releases the snapshot under this lock, and leaves a connection without a transaction.
        with self._watch.turn:
            self._watch.raise_failure()
            try:
                return reader(self.connection)
            except SourceError as error:
                if self.connection.closed or isinstance(error, SourceConnectionError | BusyError):
                    # The watch may have set `failure` since it was checked.
                    raise self._watch.failure or lost(error.message) from None
                raise

    def sessions(self, most_tables: int) -> CopySessions:
        """Return how many tables and ranges to copy at once; at least one table with one range.

        They share half of the connections that server, database and role have free now. Spark runs one task
        per core: a large cluster would leave the application no connections. Raises what `read` raises.
        """
        limits = self.read(_free_connections)
        half = min(free for free in limits if free is not None) // 2
        tables = min(most_tables, max(1, half // (_OF_TABLE + 1)))
        return CopySessions(tables, max(1, half // tables - _OF_TABLE))

    def watch(self) -> None:
        """Start watching for sessions that wait. Called once."""
        self._watch.start()

    def close(self) -> None:
        """End the snapshot. Can be called again."""
        self._watch.close()

    def __enter__(self) -> SnapshotHolder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free_connections(connection: Connection) -> tuple[int | None, ...]:
    with source_errors("asking for free connections"):
        return row(connection, _FREE)


def keep(
    dsn: str,
    snapshot: str,
    relations: list[Relation],
    publication: str | None,
    lock_timeout_s: float,
    *,
    trusts_owners: bool = False,
) -> SnapshotHolder:
    """Import an exported snapshot, and export it again.

    `lock_timeout_s`: the seconds that `hold` waits for a table. Raises SnapshotError if the snapshot no
    longer exists, a table was altered since it was selected, or a partition or the publication since the
    export: create a new slot and try again. Raises PublicationError if a table is not in the publication.
    """
    connection = connect(dsn, "keeper")
    try:
        import_snapshot(connection, snapshot)
        then = read_definitions(connection, relations, publication)
        check_as_selected(relations, then)
        check_unaltered(dsn, relations, then)
        _check_published(then)
        exported = export_again(connection)
    except BaseException:
        connection.close()
        raise
    kept = [then.relations[relation.oid] for relation in relations]
    keeper = SnapshotHolder(
        dsn, connection, exported, kept, then, lock_timeout_s, trusts_owners=trusts_owners
    )
    keeper.watch()
    return keeper


def keep_for(
    pipeline: Pipeline, dsn: str, exported: ExportedSnapshot, relations: list[Relation]
) -> SnapshotHolder:
    """Import the snapshot of a slot with the settings of a pipeline. Raises what `keep` raises."""
    return keep(
        dsn,
        exported.snapshot,
        relations,
        pipeline.publication,
        pipeline.lock_timeout_s,
        trusts_owners=pipeline.trust_table_owners,
    )


def _check_published(then: PublishedTables) -> None:
    outside = sorted(found.source_table for found in then.relations.values() if not found.membership_oid)
    name = then.publication
    if name is not None and outside:
        tables = ", ".join(table.sql for table in outside)
        raise PublicationError(
            f"not in publication {name}: {', '.join(map(str, outside))}",
            "ask the owner of the publication to run"
            f" ALTER PUBLICATION {quote_identifier(name)} ADD TABLE {tables}",
        )
