"""Sessions of the source that wait for a lock which sessions of a copy hold.

While such a session waits for ACCESS EXCLUSIVE, every later statement on the table waits behind it. The
server's deadlock detector does not help: the copy's sessions wait for each other outside the server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from airflow_provider_pgrepl.errors import one_line
from airflow_provider_pgrepl.replication.source.connection import Connection, application_name, row, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

# pg_stat_activity is read once a transaction, unless told otherwise; what it hides from the role is NULL.
_REFRESH = "SELECT pg_catalog.pg_stat_clear_snapshot();"
_COPIES = """
SELECT pid FROM pg_catalog.pg_stat_activity WHERE application_name = %(copies)s AND usename = session_user
"""
_WAITERS = """{refresh}
WITH ours (pid) AS (SELECT pg_catalog.pg_backend_pid() UNION SELECT unnest(%(pids)s::int[]) UNION {copies})
SELECT DISTINCT ON (w.pid) w.pid, a.usename::text, a.application_name, w.mode,
    CASE WHEN {replay} THEN 'standby replay' ELSE a.query END,
    w.locktype = 'virtualxid' OR w.mode = 'AccessExclusiveLock'
FROM pg_catalog.pg_locks w LEFT JOIN pg_catalog.pg_stat_activity a ON a.pid = w.pid
WHERE NOT w.granted AND w.locktype IN ('relation', 'virtualxid') AND w.pid NOT IN (SELECT pid FROM ours)
    AND (pg_catalog.pg_blocking_pids(w.pid) && ARRAY(SELECT pid FROM ours) OR {replay})
"""
# Replay of DDL waits for a lock like a session, but is no backend of which pg_blocking_pids knows. No session
# of a standby can ask for this mode. Queries of the table queue behind it. It can be an index that is waited
# for: planning a query locks the indexes of the table.
_REPLAY = """(pg_catalog.pg_is_in_recovery() AND w.mode = 'AccessExclusiveLock' AND EXISTS (
        SELECT FROM pg_catalog.pg_locks held JOIN ours ON ours.pid = held.pid WHERE held.granted
            AND held.locktype = 'relation' AND held.database = w.database AND held.relation = w.relation))"""
_END_COPIES = "{refresh} SELECT pg_catalog.pg_terminate_backend(c.pid, {patience}) FROM ({copies}) AS c"
_ACT_AS = "SELECT current_user::text, pg_catalog.set_config('role', %s, true)"

_ENDING_MS = 2000

# Two words at most: the statement's text may hold values.
_COMMAND = re.compile(r"\s*([A-Za-z]+(?:\s+[A-Za-z]+)?)")


@dataclass(frozen=True)
class LockWaiter:
    """A session that waits. `command`: the first words of its statement, if the role may see it.

    `ends_copy`: it waits for the snapshot or for ACCESS SHARE, which every copy needs; otherwise for the lock
    against code of the table's owner.
    """

    pid: int
    role: str
    application: str
    mode: str
    command: str
    ends_copy: bool

    def __str__(self) -> str:
        command = self.command or "a statement"
        return one_line(
            f"{command} of pid {self.pid} (role {self.role}, application"
            f" {self.application or 'unnamed'}, waiting for {self.mode})"
        )


def copy_role(snapshot: str) -> str:
    """Return the role of the sessions that copy under a snapshot: its name is of one table's gate."""
    return f"copy {snapshot}"


def read_waiters(connection: Connection, pids: Iterable[int] = (), snapshot: str = "") -> list[LockWaiter]:
    """Return the sessions that wait for this one, for `pids`, or for a copy under `snapshot`.

    Waits for locks on relations count, and waits for a transaction's end, as of CREATE INDEX CONCURRENTLY.
    On a standby, replay that waits for a relation that one of them has locked counts.
    """
    with source_errors("looking for sessions that wait for the copy"):
        found = rows(connection, _filled(_WAITERS), {"pids": list(pids), **_copies(snapshot)})
    return [
        LockWaiter(pid, role or "unknown", application or "", mode, _command(query or ""), ends_copy)
        for pid, role, application, mode, query, ends_copy in found
    ]


def end_copies(connection: Connection, snapshot: str) -> None:
    """End the sessions that copy under a snapshot, and wait until they are gone.

    A cancel would not reach a session whose client reads nothing.
    """
    with source_errors("ending the copies of a table"):
        # A session belongs to the role that logged in. Another one that it acts as may not end it.
        acting = row(connection, _ACT_AS, ("none",))[0]
        rows(connection, _filled(_END_COPIES), _copies(snapshot))
        row(connection, _ACT_AS, (acting,))


def _copies(snapshot: str) -> dict[str, str]:
    return {"copies": application_name(copy_role(snapshot))}


def _filled(query: str) -> str:
    return query.format(refresh=_REFRESH, copies=_COPIES, patience=_ENDING_MS, replay=_REPLAY)


def _command(query: str) -> str:
    found = _COMMAND.match(query)
    return " ".join(found[1].upper().split()) if found else ""
