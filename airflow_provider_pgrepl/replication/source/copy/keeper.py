"""The exported snapshot, kept alive while tables are copied under it, each locked in its turn."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType

from airflow_provider_pgrepl.errors import PublicationError
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row
from airflow_provider_pgrepl.replication.source.copy.copy_stream import open_copy
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import (
    Shape,
    check_as_selected,
    check_unaltered,
    export_again,
    import_snapshot,
    losses,
    read_shape,
)
from airflow_provider_pgrepl.replication.source.copy.lock_watch import LockWatch
from airflow_provider_pgrepl.replication.source.copy.ranges import CopyRange, plan_ranges
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import TableKeeper, keep_table
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

__all__ = ["CopyRange", "Keeper", "keep", "open_copy", "plan_ranges"]


_OF_TABLE = 3
"""Sessions of a table that is copied: its keeper, the gate, and for moments one that reads the catalog."""

# `reserved_connections` is there from 16 on. Walsenders of other kinds than ours have slots of their own.
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


@dataclass(frozen=True)
class CopySessions:
    """How many tables are copied at once, and how many ranges of each."""

    tables: int
    ranges: int


class Keeper:
    """A transaction that holds a snapshot until it is closed.

    `snapshot` is the name under which it is imported, `relations` the tables as they were in it. It locks no
    table: `hold` does, when the table's turn has come. As soon as a session of the source waits for its end,
    as CREATE INDEX CONCURRENTLY on any table does, the snapshot is given up, and `hold` raises SnapshotError.
    """

    def __init__(
        self,
        dsn: str,
        connection: Connection,
        snapshot: str,
        relations: list[Relation],
        then: Shape,
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

    def hold(self, relation: Relation) -> TableKeeper:
        """Lock a table as it was in the snapshot, in a session of its own.

        Raises TableSnapshotError if the table was altered since the export, or the lock is not had in time: a
        new snapshot is needed for it. Raises SnapshotError if the snapshot is gone.
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

    def sessions(self, most_tables: int) -> CopySessions:
        """Share half of the connections that server, database and role have free now; at least one range.

        Spark runs as many tasks at once as it has cores: the sessions of a large cluster would leave the
        application none.
        """
        with source_errors("asking for free connections"):
            limits = row(self.connection, _FREE)
        half = min(free for free in limits if free is not None) // 2
        tables = min(most_tables, max(1, half // (_OF_TABLE + 1)))
        return CopySessions(tables, max(1, half // tables - _OF_TABLE))

    def watch(self) -> None:
        """Begin to look for sessions that wait. To be called once."""
        self._watch.start()

    def close(self) -> None:
        """End the snapshot. Can be called again."""
        self._watch.close()

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
    """Import an exported snapshot, and export it again.

    `lock_timeout_s`: how long `hold` waits for a table. Raises SnapshotError (make a new slot and try again)
    if the snapshot is gone, or a table was altered since it was selected, or a partition or the publication
    since the export. Raises PublicationError if a table is not in the publication at all.
    """
    connection = connect(dsn, "keeper")
    try:
        import_snapshot(connection, snapshot)
        then = read_shape(connection, relations, publication)
        check_as_selected(relations, then)
        check_unaltered(dsn, relations, then)
        _check_published(then)
        exported = export_again(connection)
    except BaseException:
        connection.close()
        raise
    kept = [then.relations[relation.oid] for relation in relations]
    keeper = Keeper(dsn, connection, exported, kept, then, lock_timeout_s, trusts_owners=trusts_owners)
    keeper.watch()
    return keeper


def _check_published(then: Shape) -> None:
    outside = sorted(str(found.table) for found in then.relations.values() if not found.membership_oid)
    if then.publication is not None and outside:
        raise PublicationError(f"{', '.join(outside)}: not in publication {then.publication}")
