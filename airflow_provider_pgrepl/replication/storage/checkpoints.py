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
        """Begin one of a version that is on the disk, when the table has come to it from an earlier one and
        it is time; unless the last is still being written."""
        if version // self._every == before // self._every:
            return
        if self._writing is None or not self._writing.is_alive():
            # Waited for when the process ends: deltalake at work in a daemon thread would crash it then.
            self._writing = threading.Thread(target=self._write, args=(version,), name="pgrepl-checkpoint")
            self._writing.start()

    def _write(self, version: int) -> None:
        """Of this very version: a newer one may not be on the disk, and be set aside."""
        try:
            open_delta(self._uri, version).create_checkpoint()
            durable.flush_checkpoint(self._uri, version)
        except (DeltaError, OSError) as error:
            log.warning("%s: no checkpoint could be written: %s", self._uri, type(error).__name__)
