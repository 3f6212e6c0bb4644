"""LockKeeper: looks after the lock of an app that uses the state database for nothing else."""

from __future__ import annotations

import logging
from collections.abc import Callable

from airflow_provider_pgrepl.errors import BusyError, PgReplError
from airflow_provider_pgrepl.replication.runtime.block_thread import BlockThread
from airflow_provider_pgrepl.replication.state.store import Store

log = logging.getLogger(__name__)

_INTERVAL_S = 10.0


class LockKeeper(BlockThread):
    """A context manager that asks `store`, a reconnecting one, every few seconds whether its session lives.

    A restarted server has no session of this app: to other commands, such as teardown, the app would seem
    to have ended. The store then connects and takes its locks again. While the database is away, nothing
    happens. If another process has a lock by then, `end` is called, in the thread of the keeper.
    """

    def __init__(self, store: Store, end: Callable[[], object], interval_s: float = _INTERVAL_S) -> None:
        super().__init__("pgrepl-lock")
        self._store = store
        self._end = end
        self._interval_s = interval_s

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self._store.now()
            except BusyError as error:
                if not self._stopping.is_set():
                    log.error("%s", error)
                    self._end()
                return
            except PgReplError as error:
                log.debug("the state database is away: %s", error.message)
