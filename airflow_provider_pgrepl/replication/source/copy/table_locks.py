"""Locks on tables, and the sessions that hold one which is not had in time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import psycopg2.errors

from airflow_provider_pgrepl.errors import SnapshotError, one_line
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.partitions import read_leaves
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.server_errors import describe, source_errors

Mode = Literal["ACCESS SHARE", "SHARE ROW EXCLUSIVE"]

_IN_THE_WAY: dict[Mode, tuple[str, ...]] = {
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

# A lock that is waited for stands in the way too: locks are given in the order in which they are asked for.
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


def lock_tables(
    connection: Connection, dsn: str, relations: Sequence[Relation], timeout_s: float = 0
) -> None:
    """Lock tables against DDL, with all their partitions, within a transaction that has begun; do not wait.

    `timeout_s`: for how long the caller tries this, for the message. Raises as `lock_errors` does.
    """
    if relations:
        with (
            source_errors("locking the tables"),
            lock_errors(connection, dsn, relations, "ACCESS SHARE", timeout_s),
            connection.cursor() as cursor,
        ):
            cursor.execute(lock_command(relations, "ACCESS SHARE") + " NOWAIT")


def lock_command(relations: Iterable[Relation], mode: Mode) -> str:
    """Return the LOCK TABLE of tables with all their partitions."""
    # Without ONLY a lock reaches the partitions, and also the children by inheritance, which are not ours.
    listed = (one.table.sql if one.relkind == "p" else f"ONLY {one.table.sql}" for one in relations)
    return f"LOCK TABLE {', '.join(listed)} IN {mode} MODE"


@contextmanager
def lock_errors(
    connection: Connection, dsn: str, relations: Sequence[Relation], mode: Mode, timeout_s: float
) -> Iterator[None]:
    """Raise SnapshotError for a lock that `connection` does not get, with the sessions that are in the way,
    and for a table that is no longer there."""
    try:
        yield
    except (psycopg2.errors.LockNotAvailable, psycopg2.errors.QueryCanceled):
        raise SnapshotError(
            f"{', '.join(str(relation.table) for relation in relations)}: could not be locked ({mode})"
            f" within {timeout_s:g} s, because of {_holders(connection, dsn, relations, mode)}",
            "try again when that is done, or raise lock_timeout_s",
        ) from None
    except psycopg2.errors.DeadlockDetected:
        raise SnapshotError("locking the tables met a deadlock with other sessions", "try again") from None
    except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName) as error:
        raise SnapshotError(f"a table was dropped or renamed meanwhile: {describe(error)}") from None


def _holders(connection: Connection, dsn: str, relations: Iterable[Relation], mode: Mode) -> str:
    """Who holds, or waits for, a lock that ours does not go with; asked right after the wait was given up."""
    control = connect(dsn, "who blocks")
    try:
        oids = {leaf.oid for relation in relations for leaf in read_leaves(control, relation.oid)}
        oids |= {relation.oid for relation in relations}
        found = rows(
            control,
            _HOLDERS,
            {
                "oids": sorted(oids),
                "modes": list(_IN_THE_WAY[mode]),
                "ours": [connection.info.backend_pid, control.info.backend_pid],
            },
        )
    finally:
        control.close()
    return "; ".join(one_line(text) for (text,) in found) or "a session that has released it since"
