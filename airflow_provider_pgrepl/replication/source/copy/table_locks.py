"""Locks on tables, and the sessions that hold one which is not had in time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import psycopg2.errors

from airflow_provider_pgrepl.errors import SnapshotError, one_line
from airflow_provider_pgrepl.replication.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import read_leaves
from airflow_provider_pgrepl.replication.source.connection import (
    Connection,
    connect,
    describe,
    rows,
    source_errors,
)
from airflow_provider_pgrepl.replication.source.time_limit import ANSWER_LIMIT_S, patience

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
    connection: Connection,
    dsn: str,
    relations: Sequence[Relation],
    mode: Mode,
    wait_s: float,
    timeout_s: float | None = None,
) -> None:
    """Lock tables, with all their partitions, within a transaction that has begun.

    `wait_s`: how long to wait for each lock; 0 for not at all. `timeout_s`: how long this is tried in all,
    for the message. Raises SnapshotError when a lock is not had in time, naming who holds one that is in the
    way, or when a table is no longer there; PrivilegeError when the role may not.
    """
    if not relations:
        return
    milliseconds, nowait = max(1, int(wait_s * 1000)), "" if wait_s else " NOWAIT"
    patient = patience(connection, wait_s + ANSWER_LIMIT_S)
    with source_errors("locking the tables"), patient, connection.cursor() as cursor:
        try:
            cursor.execute("SELECT pg_catalog.set_config('lock_timeout', %s, true)", (str(milliseconds),))
            cursor.execute(f"LOCK TABLE {', '.join(map(_locked, relations))} IN {mode} MODE{nowait}")
        except psycopg2.errors.LockNotAvailable:
            raise SnapshotError(
                f"{', '.join(str(relation.table) for relation in relations)}: could not be locked ({mode})"
                f" within {timeout_s or wait_s:g} s, because of {_holders(connection, dsn, relations, mode)}",
                "try again when that is done, or raise lock_timeout_s",
            ) from None
        except psycopg2.errors.DeadlockDetected:
            raise SnapshotError(
                "locking the tables met a deadlock with other sessions", "try again"
            ) from None
        except (psycopg2.errors.UndefinedTable, psycopg2.errors.InvalidSchemaName) as error:
            raise SnapshotError(f"a table was dropped or renamed meanwhile: {describe(error)}") from None


def _locked(relation: Relation) -> str:
    # Without ONLY a lock reaches the partitions, and also the children by inheritance, which are not ours.
    return relation.table.sql if relation.relkind == "p" else f"ONLY {relation.table.sql}"


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
    return "; ".join(one_line(text) for (text,) in found) or "somebody who has just let go of it"
