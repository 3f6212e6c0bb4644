"""SlotInUse: keeps the server from invalidating a slot that nobody reads during a long copy.

From PostgreSQL 18 on a server may be set to invalidate slots that are idle for long. A slot counts as idle
from when it was last released.
https://www.postgresql.org/docs/18/runtime-config-replication.html#GUC-IDLE-REPLICATION-SLOT-TIMEOUT
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from types import TracebackType
from typing import Self

from airflow_provider_pgrepl.errors import BusyError, PgReplError
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, rows
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot.record import advance_slot, read_slot

log = logging.getLogger(__name__)

_MOST_S = 600.0
"""Also how often it is looked whether there is a timeout: the server may have got one."""
_USES = 3
"""How often within the timeout: one of them may fail."""
_TIMEOUT = "SELECT setting::float FROM pg_catalog.pg_settings WHERE name = 'idle_replication_slot_timeout'"


class SlotInUse:
    """A context manager whose thread uses the slot `name` again and again, where the server has a timeout.

    A slot is used by moving it to where it stands: nothing is confirmed. One that a receiver reads is in use,
    and left alone; and so it is when it cannot be used, which is logged: the copy needs no slot.
    """

    def __init__(self, dsn: str, name: str) -> None:
        self._dsn, self._name = dsn, name
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pgrepl-slot-in-use", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()

    def _run(self) -> None:
        pause_s = 0.0
        while not self._stopping.wait(pause_s):
            try:
                with closing(connect(self._dsn, "slot in use")) as connection:
                    timeout_s = self._use(connection)
                pause_s = min(_MOST_S, timeout_s / _USES) if timeout_s else _MOST_S
            except BusyError:
                log.debug("slot %s is read", self._name)
            except PgReplError as error:
                log.warning("slot %s may become idle for too long: %s", self._name, error.message)
            pause_s = pause_s or _MOST_S / _USES

    def _use(self, connection: Connection) -> float:
        """Use the slot if the server has a timeout, which is returned, in seconds; 0 for none."""
        with source_errors("asking for limits of slots"):
            timeout_s = next((float(setting) for (setting,) in rows(connection, _TIMEOUT)), 0.0)
        slot = read_slot(connection, self._name) if timeout_s else None
        if slot is not None and not slot.active and not slot.invalidation and slot.confirmed_flush_lsn:
            advance_slot(connection, self._name, slot.confirmed_flush_lsn)
        return timeout_s
