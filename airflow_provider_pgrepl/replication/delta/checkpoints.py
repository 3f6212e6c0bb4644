"""Checkpoints of a table's log, beside the work of who commits: what is committed stays so without them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import durable

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
        with _told(self._uri):
            write_checkpoint(open_delta(self._uri, version))


def write_checkpoint(table: DeltaTable) -> None:
    """Of the version where the handle stands, which is on the disk. What is committed stays so without."""
    with _told(table.table_uri):
        table.create_checkpoint()
        durable.flush_checkpoint(table.table_uri, table.version())


@contextmanager
def _told(uri: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        log.warning("%s: no checkpoint could be written: %s", uri, type(error).__name__)
