"""Whether the server has ended a session that another thread uses now and then.

A server that shuts down ends its sessions with an error that nobody has asked for, and then waits for its
walsenders until they have sent everything, and what they sent is confirmed.
https://www.postgresql.org/docs/current/server-shutdown.html
"""

from __future__ import annotations

import select
import time
from contextlib import suppress

import psycopg2

from airflow_provider_pgrepl.replication.source.connection import Connection

UNREAD_S = 2.0
"""How long what the server has sent may lie unread. An answer is read within milliseconds."""
_LOOKS = 20
"""So often it is looked at least: a process that was paused finds an answer that has waited for it."""


class EndedSession:
    """One session's. `has_ended` may be called from any thread, and sends nothing."""

    def __init__(self, connection: Connection, unread_s: float = UNREAD_S) -> None:
        self._connection = connection
        self._unread_s = unread_s
        self._unread_since: float | None = None
        self._looks = 0

    def has_ended(self) -> bool:
        """Return True after what the server has sent was not read for some seconds: it is no answer."""
        if not self._is_unread():
            self._unread_since = None
            return False
        now = time.monotonic()
        if self._unread_since is None:
            self._unread_since, self._looks = now, 0
        self._looks += 1
        return self._looks >= _LOOKS and now - self._unread_since >= self._unread_s

    def _is_unread(self) -> bool:
        # Who works with the connection may have lost and closed it, and says so himself.
        with suppress(psycopg2.Error, OSError, ValueError):
            ready, _, _ = select.select([self._connection.fileno()], [], [], 0)
            return bool(ready)
        return False
