"""Checkpoints of a table's log, beside the work of who commits: what is committed stays so without them."""

from __future__ import annotations

import logging
import threading

from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.replication.storage import durable
from airflow_provider_pgrepl.replication.storage.delta_tables import open_delta

log = logging.getLogger(__name__)


class Checkpoints:
    """Of a table that this process commits to, one every so many versions. Who opens the table reads all
    commits since the last one."""

    def __init__(self, uri: str, every: int) -> None:
        self._uri, self._every = uri, every
        self._writing: threading.Thread | None = None

    def after(self, before: int, version: int) -> None:
        """Begin one, unless the last is still being written, when the table has come from one version to
        another and it is time."""
        if version // self._every == before // self._every:
            return
        if self._writing is None or not self._writing.is_alive():
            self._writing = threading.Thread(target=self._write, name="pgrepl-checkpoint", daemon=True)
            self._writing.start()

    def wait(self) -> None:
        """Until none is being written."""
        if self._writing is not None:
            self._writing.join()

    def _write(self) -> None:
        try:
            table = open_delta(self._uri)
            table.create_checkpoint()
            durable.flush_checkpoint(self._uri, int(table.version()))
        except (DeltaError, OSError) as error:
            log.warning("%s: no checkpoint could be written: %s", self._uri, type(error).__name__)
