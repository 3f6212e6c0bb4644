"""Liveness: whether a replication stream on which nothing comes is quiet, or dead.

A server that is alive answers when it is asked for a keepalive, except while it decodes a transaction of
which nothing is published: that may take minutes, and breaking it off would only begin it again. So whoever
got no answer asks the server, over another connection, what the sender of the stream is doing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import closing

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.source.connection import connect, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors

log = logging.getLogger(__name__)

SILENCE_LIMIT_S = 30.0
"""How long nothing may come, although half of that ago the server was asked for a word."""

# The sender waits for us, or for WAL, when its wait event is of type Client or Activity. In any other case,
# also without a wait event, it works. https://www.postgresql.org/docs/current/monitoring-stats.html
_AT_WORK = """
SELECT coalesce(wait_event_type, '') NOT IN ('Client', 'Activity')
FROM pg_catalog.pg_stat_activity WHERE pid = %s AND backend_type = 'walsender'
"""


class Liveness:
    """One stream's clock. `heard` whenever something came; `must_ask` while nothing comes."""

    def __init__(self, is_at_work: Callable[[], bool], limit_s: float = SILENCE_LIMIT_S) -> None:
        self._is_at_work = is_at_work
        self._limit_s = limit_s
        self.heard()

    def heard(self) -> None:
        """The stream is alive; time that we took ourselves, to pass on what came, counts as heard."""
        self._last = time.monotonic()
        self._asked = False

    def must_ask(self) -> bool:
        """Whether it is time to ask the server for a keepalive, once a silence.

        Raises SourceConnectionError when it was asked, has not answered, and is not at work either.
        """
        silent_s = time.monotonic() - self._last
        if silent_s >= self._limit_s:
            self._judge(silent_s)
        if self._asked or silent_s < self._limit_s / 2:
            return False
        self._asked = True
        return True

    def _judge(self, silent_s: float) -> None:
        if not self._is_at_work():
            raise SourceConnectionError(
                f"the replication stream has been silent for {silent_s:.0f} s, also when asked for a word",
                "the network between here and the source swallows what is sent, or the source stands still",
            )
        log.warning(
            "the source has sent nothing for %.0f s; its sender is decoding what comes next", silent_s
        )
        self.heard()


def is_at_work(dsn: str, pid: int) -> bool:
    """Whether the sender with this pid works on something; it is not when it waits, or is gone.

    Raises SourceConnectionError when the server cannot be asked.
    """
    with closing(connect(dsn, "liveness")) as connection, source_errors("asking for the stream's sender"):
        return any(at_work for (at_work,) in rows(connection, _AT_WORK, (pid,)))
