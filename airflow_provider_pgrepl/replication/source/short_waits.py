"""Waits for locks that keep no statement of the application waiting behind them for long."""

from __future__ import annotations

import time
from collections.abc import Callable

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.time_limit import ANSWER_LIMIT_S, patience

SHORT_WAIT_S = 0.5
"""The longest single wait for a lock that keeps the application's statements waiting behind it.

Less than the second after which the server looks for deadlocks, and might end the application's transaction.
"""

AUTOVACUUM_WAIT_S = 1.3
"""The last wait: after a second (`deadlock_timeout`) the server cancels an autovacuum that is in the way.

https://www.postgresql.org/docs/current/routine-vacuuming.html#AUTOVACUUM
"""


def with_short_waits(
    attempt: Callable[[float], None],
    timeout_s: float,
    refusal: type[PgReplError] = SnapshotError,
) -> None:
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
    """Execute a command in a transaction of its own that waits for each lock so long at most."""
    patient = patience(connection, wait_s + ANSWER_LIMIT_S)
    with patient, connection.cursor() as cursor:
        cursor.execute("BEGIN")
        try:
            cursor.execute(f"SET LOCAL lock_timeout = {max(1, int(wait_s * 1000))}")
            cursor.execute(command)
            cursor.execute("COMMIT")
        except BaseException:
            if not connection.closed:
                cursor.execute("ROLLBACK")
            raise
