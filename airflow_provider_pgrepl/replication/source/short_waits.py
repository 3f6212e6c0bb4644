"""Waits for locks that keep no statement of the application waiting behind them for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError
from airflow_provider_pgrepl.replication.source.connection import ANSWER_LIMIT_S, Connection, patience

T = TypeVar("T")

SHORT_WAIT_S = 0.5
"""The longest single wait for a lock that keeps the application's statements waiting behind it."""

AUTOVACUUM_WAIT_S = 1.3
"""The last wait: after a second (`deadlock_timeout`) the server cancels an autovacuum that is in the way.

https://www.postgresql.org/docs/current/routine-vacuuming.html#AUTOVACUUM
"""

# A session that waits for one of our locks looks for deadlocks after `deadlock_timeout`, and its transaction
# fails if we still wait for a lock of its own. So we hold locks and wait for others for half as long at most.
_REMAINING = """
SELECT pg_catalog.set_config('statement_timeout', greatest(1, least({limit_ms}, setting::int / 2)
    - (extract(epoch FROM pg_catalog.clock_timestamp() - pg_catalog.now()) * 1000)::int)::text, true)
FROM pg_catalog.pg_settings WHERE name = 'deadlock_timeout'
"""


def with_short_waits(
    attempt: Callable[[float], T],
    timeout_s: float,
    refusal: type[PgReplError] = SnapshotError,
) -> T:
    """Call `attempt` with how long it may wait for a lock, again and again for `timeout_s`, until it returns.

    Between two attempts the statements that came behind it get their turn. The last one waits longer, unless
    `timeout_s` is short itself, so that an autovacuum does not keep the lock for hours. `refusal` is what it
    raises if it did not get the lock, and holds no other then. Raises the last refusal, and every other error
    at once.
    """
    deadline = time.monotonic() + timeout_s
    wait_s = min(timeout_s, SHORT_WAIT_S)
    while True:
        is_last = time.monotonic() + wait_s / 2 >= deadline
        try:
            return attempt(AUTOVACUUM_WAIT_S if is_last and timeout_s > 2 * AUTOVACUUM_WAIT_S else wait_s)
        except refusal:
            if is_last:
                raise
            time.sleep(wait_s)


def execute_within(connection: Connection, command: str, wait_s: float) -> None:
    """Execute a command that takes one lock of a table, in a transaction that waits so long for it at most.

    Raises psycopg2's errors, LockNotAvailable among them.
    """
    _execute(connection, [f"SET LOCAL lock_timeout = {_ms(wait_s)}", command], wait_s)


def execute_together(connection: Connection, commands: Sequence[str], limit_s: float) -> None:
    """Execute commands that take locks of several tables in one transaction, within `limit_s` in all.

    The limit is shorter where `deadlock_timeout` is. Raises psycopg2's errors, QueryCanceled among them.
    """
    remaining = _REMAINING.format(limit_ms=_ms(limit_s))
    _execute(connection, [one for command in commands for one in (remaining, command)], limit_s)


def _execute(connection: Connection, commands: Sequence[str], limit_s: float) -> None:
    patient = patience(connection, limit_s + ANSWER_LIMIT_S)
    with patient, connection.cursor() as cursor:
        try:
            # One message: no lock is held while the network or this process takes its time.
            cursor.execute("; ".join(("BEGIN", *commands, "COMMIT")))
        except BaseException:
            if not connection.closed:
                cursor.execute("ROLLBACK")
            raise


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
