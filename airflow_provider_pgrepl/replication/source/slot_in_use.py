"""SlotInUse: keeps the server from invalidating a slot that nobody reads during a long copy.

From PostgreSQL 18 on a server may be set to invalidate slots that are idle for long. A slot counts as idle
from when it was last released.
https://www.postgresql.org/docs/18/runtime-config-replication.html#GUC-IDLE-REPLICATION-SLOT-TIMEOUT
"""

from __future__ import annotations

import logging
import time
from contextlib import closing

from airflow_provider_pgrepl.errors import BusyError, PgReplError
from airflow_provider_pgrepl.replication.runtime.block_thread import BlockThread
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot import advance_slot, read_slot

log = logging.getLogger(__name__)

_MOST_S = 600.0
"""Also how often it is looked whether there is a timeout: the server may have got one."""
_USES, _TRIES = 2, 8
"""How often within the timeout it is used, and tried again after an error. Each use decodes from the slot's
restart_lsn on, which is far back while a transaction is open for long."""
_LEAVING_S = 1.0
_TIMEOUT = "SELECT setting::float FROM pg_catalog.pg_settings WHERE name = 'idle_replication_slot_timeout'"


class SlotInUse(BlockThread):
    """A context manager whose thread uses the slot `name` again and again, where the server has a timeout.

    A slot is used by moving it to where it stands: nothing is confirmed. One that a receiver reads is in use,
    and left alone; and so it is when it cannot be used, which is logged: the copy needs no slot.
    """

    def __init__(self, dsn: str, name: str) -> None:
        super().__init__("pgrepl-slot-in-use", _LEAVING_S)
        self._dsn, self._name = dsn, name
        self._timeout_s: float | None = None
        self._used_s: float | None = None

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                with closing(connect(self._dsn, "slot in use")) as connection:
                    self._look(connection)
            except BusyError:
                self._used_s = time.monotonic()
                log.debug("slot %s is read", self._name)
            except PgReplError as error:
                log.warning("slot %s may become idle for too long: %s", self._name, error.message)
            pause_s = self._pause_s()

    def _pause_s(self) -> float:
        if self._timeout_s is None:  # not known yet
            return _MOST_S / _TRIES
        return min(_MOST_S, max(self._due_s(), self._timeout_s / _TRIES)) if self._timeout_s else _MOST_S

    def _due_s(self) -> float:
        """In how many seconds the slot must be used, if there is a timeout."""
        if self._used_s is None or self._timeout_s is None:
            return 0.0
        return self._used_s + self._timeout_s / _USES - time.monotonic()

    def _look(self, connection: Connection) -> None:
        """Use the slot if the server has a timeout, and half of it has passed."""
        with source_errors("asking for limits of slots"):
            self._timeout_s = next((float(setting) for (setting,) in rows(connection, _TIMEOUT)), 0.0)
        if self._timeout_s and self._due_s() <= 0:
            self._use(connection)
            self._used_s = time.monotonic()

    def _use(self, connection: Connection) -> None:
        slot = read_slot(connection, self._name)
        if slot is not None and not slot.active and not slot.invalidation and slot.confirmed_flush_lsn:
            advance_slot(connection, self._name, slot.confirmed_flush_lsn)
