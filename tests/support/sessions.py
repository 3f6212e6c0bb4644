"""Sessions with test databases that stay open for their next use: one costs as much as ten statements."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator

import psycopg2
from psycopg2.extensions import TRANSACTION_STATUS_IDLE

from airflow_provider_pgrepl.replication.source.connection import Connection, connect

_free: defaultdict[tuple[str, bool], list[Connection]] = defaultdict(list)
_RESET = "discard all"
_RESET_PINNED = (
    "reset role; set lock_timeout = 0; set statement_timeout = 0; select pg_catalog.pg_advisory_unlock_all()"
)


@contextlib.contextmanager
def session(dsn: str, *, pinned: bool = False) -> Iterator[Connection]:
    """An autocommit session, with the settings of this program's sessions if `pinned`."""
    connection = _take(dsn, pinned) or _open(dsn, pinned)
    is_usable = False
    try:
        yield connection
        is_usable = not connection.closed and connection.info.transaction_status == TRANSACTION_STATUS_IDLE
    finally:
        if is_usable:
            _free[dsn, pinned].append(connection)
        else:
            connection.close()


def close_sessions(dsn: str) -> None:
    """Close the free sessions with a database, so that it can be dropped or copied."""
    for pinned in (False, True):
        for connection in _free.pop((dsn, pinned), []):
            connection.close()


def _take(dsn: str, pinned: bool) -> Connection | None:
    while True:
        try:
            connection = _free[dsn, pinned].pop()
        except IndexError:
            return None
        with contextlib.suppress(psycopg2.Error):  # if the server was restarted, or has ended the session
            connection.cursor().execute(_RESET_PINNED if pinned else _RESET)
            return connection


def _open(dsn: str, pinned: bool) -> Connection:
    if pinned:
        return connect(dsn, "test")
    connection = psycopg2.connect(dsn)
    connection.autocommit = True
    return connection
