"""The time of the host, corrected by the storage's own clock if the host's is ahead.

Files are deleted some minutes after they were removed: a host whose clock is ahead would not wait.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta

from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.filesystem import delete_files, open_storage
from airflow_provider_pgrepl.replication.storage.stores.object_store import is_store

UNKNOWN_MARGIN = timedelta(minutes=15)
"""How far a clock may be ahead where the storage takes no file that would tell."""


def storage_lead(folder: str, now: datetime) -> timedelta:
    """Return how far `now` is ahead of the storage's clock; zero if it is not.

    Writes an empty file into `folder`, which must be a private one of this package, and deletes it.
    """
    try:
        stamp = _stamp(folder)
    except OSError:
        return UNKNOWN_MARGIN
    return max(now - stamp, timedelta(0))


def _stamp(folder: str) -> datetime:
    filesystem, root = open_storage(folder)
    path = f"{root}/.clock-{uuid.uuid4().hex}"
    try:
        if is_store(filesystem):
            objects.put(filesystem, path, b"")
            found = objects.look_at(filesystem, path)
            stamp = found["last_modified"] if found is not None else datetime.now(UTC)
        else:
            filesystem.open_output_stream(path).close()
            stamp = filesystem.get_file_info(path).mtime
    finally:
        delete_files(filesystem, [path])
    return stamp
