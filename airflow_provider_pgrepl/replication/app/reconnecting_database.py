"""A store that connects again when its connection is lost, for example because the server restarts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any, cast

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.receiver.receiver import FIRST_PAUSE_S, LONGEST_PAUSE_S
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.locks import Purpose, Session

log = logging.getLogger(__name__)

Wait = Callable[[float], bool]
"""Waits for a number of seconds, and returns True if it is time to end."""


def open_reconnecting_database(dsn: str, role: str, reconnect_s: float, wait: Wait) -> StateDatabase:
    """Return a store that connects again after a lost connection, takes its locks again and repeats the call.

    Every statement of a store may be executed twice. The locks are taken over from the lost session, which
    the server may still consider alive. If another process holds a lock, BusyError is raised at once: this
    process has to end. After `reconnect_s` seconds, or when it is time to end, the connection error is
    raised. What is soon written again is tried only once: progress and samples.
    """
    return cast(StateDatabase, _ReconnectingStateDatabase(dsn, role, reconnect_s, wait))


_REPEATED = frozenset(
    {
        "write_progress",
        "write_publisher",
        "write_sample",
        "write_table_samples",
        "delete_old_samples",
        "delete_old_events",
    }
)


class _ReconnectingStateDatabase:
    def __init__(self, dsn: str, role: str, reconnect_s: float, wait: Wait) -> None:
        self._dsn = dsn
        self._role = role
        self._reconnect_s = reconnect_s
        self._wait = wait
        self._locks: list[tuple[str, Purpose]] = []
        self._session = Session()
        self._reopening = threading.RLock()
        self._is_closed = False
        self._state_db = StateDatabase(dsn, role)

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._state_db, name)

        @wraps(method)
        def call(*arguments: Any, **named: Any) -> Any:
            state_db = self._state_db
            try:
                return getattr(state_db, name)(*arguments, **named)
            except SourceConnectionError as error:
                self._reopen(state_db, error, 0.0 if name in _REPEATED else self._reconnect_s)
                return getattr(self._state_db, name)(*arguments, **named)

        return call

    def lock(self, pipeline: str, purpose: Purpose) -> None:
        self._state_db.lock(pipeline, purpose)
        self._locks.append((pipeline, purpose))
        self._session = self._state_db.session

    def close(self) -> None:
        """Close the store for good: a thread that still uses it does not connect and lock again."""
        with self._reopening:
            self._is_closed = True
            self._state_db.close()

    def _reopen(self, lost: StateDatabase, error: SourceConnectionError, patience_s: float) -> None:
        """Connect again, unless another thread has done so.

        Raises the error of the last attempt, `error` if the store is closed, and BusyError at once if another
        process has taken a lock in the meantime.
        """
        deadline, pause_s = time.monotonic() + patience_s, FIRST_PAUSE_S
        while True:
            with self._reopening:
                if self._is_closed:
                    raise error
                if self._state_db is not lost:
                    return
                try:
                    self._state_db = self._open()
                except SourceConnectionError:
                    if time.monotonic() + pause_s > deadline:
                        raise
                else:
                    lost.close()
                    log.info("connected to the state database again")
                    return
            if self._wait(pause_s):
                deadline = 0.0
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _open(self) -> StateDatabase:
        state_db = StateDatabase(self._dsn, self._role)
        try:
            for pipeline, purpose in self._locks:
                state_db.lock(pipeline, purpose, self._session)
        except BaseException:
            state_db.close()
            raise
        self._session = state_db.session
        return state_db
