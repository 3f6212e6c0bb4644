"""Table versions whose consistent points were deleted a short time ago, as the log of the points' table says.

A reader may have opened such a version, and any process may maintain the lake: so the lake says it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any

from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import points_uri
from airflow_provider_pgrepl.replication.lake.history.place import path_of
from airflow_provider_pgrepl.replication.lake.point_files import read_rows
from airflow_provider_pgrepl.replication.storage import (
    commit_version,
    log_path,
    open_storage,
    read_commit_actions,
    storage_errors,
)


def released_versions(lake_root: str, since: datetime) -> dict[str, set[int]]:
    """Return, by a table's path, the versions that points named which were replaced since then.

    Versions that a kept point still names are among them. Raises LakeError, LakeUnavailableError.
    """
    versions: dict[str, set[int]] = {}
    uri = points_uri(lake_root)
    filesystem, root = open_storage(uri)
    with storage_errors(root):
        for path in _replaced_files(filesystem, root, since):
            for key, version in _named(uri, path):
                versions.setdefault(path_of(key), set()).add(version)
    return versions


def _replaced_files(filesystem: fs.FileSystem, root: str, since: datetime) -> Iterator[str]:
    """By the storage's clock, as the log's files have it."""
    for info in filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True)):
        version = commit_version(info.base_name)
        if version is not None and info.mtime >= since:
            actions = _read(filesystem, root, version)
            yield from (action["remove"]["path"] for action in actions if "remove" in action)


def _read(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    try:
        return read_commit_actions(filesystem, root, version)
    except FileNotFoundError:
        return []  # Another process cleaned the log: it is older than a released version is held.
    except ValueError:
        raise LakeError(f"commit {version} of the consistent points cannot be read") from None


def _named(uri: str, path: str) -> Iterator[tuple[str, int]]:
    try:
        rows = read_rows(uri, path)
    except FileNotFoundError:
        return  # Maintenance deletes it later than a released version is held.
    for row in rows:
        yield from row["tables"] or ()
