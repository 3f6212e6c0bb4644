"""Lock waits so short that the application's statements do not queue behind them for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError

from .connection import ANSWER_LIMIT_S, Connection, patience

T = TypeVar("T")

SHORT_WAIT_S = 0.5
"""The longest single wait, in seconds, for a lock behind which the application's statements queue."""

AUTOVACUUM_WAIT_S = 1.3
"""The last wait, in seconds: after 1 s (`deadlock_timeout`) the server cancels a blocking autovacuum.

https://www.postgresql.org/docs/current/routine-vacuuming.html#AUTOVACUUM
"""

# A session that waits for a lock of this one checks for deadlocks after `deadlock_timeout`, and fails if this
# one still waits for its lock. So this session holds locks and waits for others for at most half that time.
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
    """Call `attempt` until it returns, for about `timeout_s` seconds, and return its result.

    `attempt` receives the seconds that it may wait for a lock. Between two attempts, the statements that
    queued behind it run. The last wait is longer, unless `timeout_s` is short, so that an autovacuum does not
    keep the lock for hours. If `attempt` does not get the lock, it raises `refusal` and holds no other lock.
    Raises the last `refusal`, and every other error at once.
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
    """Execute a command that locks one table, in a transaction that waits up to `wait_s` seconds for it.

    Raises psycopg2's errors, LockNotAvailable among them.
    """
    _execute(connection, [f"SET LOCAL lock_timeout = {_ms(wait_s)}", command], wait_s)


def execute_together(connection: Connection, commands: Sequence[str], limit_s: float) -> None:
    """Execute commands that lock several tables in one transaction, within `limit_s` seconds in total.

    The limit is half of `deadlock_timeout` if that is shorter. Raises psycopg2's errors, QueryCanceled among
    them.
    """
    remaining = _REMAINING.format(limit_ms=_ms(limit_s))
    _execute(connection, [one for command in commands for one in (remaining, command)], limit_s)


def _execute(connection: Connection, commands: Sequence[str], limit_s: float) -> None:
    patient = patience(connection, limit_s + ANSWER_LIMIT_S)
    with patient, connection.cursor() as cursor:
        try:
            # Send one message, so that no lock is held while the network or this process is slow.
            cursor.execute("; ".join(("BEGIN", *commands, "COMMIT")))
        except BaseException:
            if not connection.closed:
                cursor.execute("ROLLBACK")
            raise


def _ms(seconds: float) -> int:
    return max(1, int(seconds * 1000))
