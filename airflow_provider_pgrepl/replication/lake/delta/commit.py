"""Commits that this package writes into a table's log itself, because deltalake cannot.

deltalake 1.6 cannot write deletion vectors. When it sets a table property, it declares features that the
table does not use (variantType), so that other readers then reject the table.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from typing import Any

from deltalake import CommitProperties, DeltaTable

from airflow_provider_pgrepl.replication.delta.checkpoints import write_checkpoint
from airflow_provider_pgrepl.replication.delta.log import put_version
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile
from airflow_provider_pgrepl.replication.settings.lake import is_object_store
from airflow_provider_pgrepl.replication.storage import durable, read_commit, storage_errors

CHECKPOINT_EVERY, STORE_CHECKPOINT_EVERY = 100, 20
"""Versions from one checkpoint to the next; the first is deltalake's default for its own commits.

To open a table, each commit since the last checkpoint is read. In an object store each is one request.
"""


class VersionTakenError(Exception):
    """Another process has committed since the handle was opened, so the planned actions may be outdated."""


def check_version(table: DeltaTable, read: int) -> None:
    """Raise VersionTakenError unless the handle is at the version `read`, or at the one after it.

    This package's commit of bounds may have added one version. A larger difference means that the handle also
    took in commits of others, which may have removed files.
    """
    if int(table.version()) not in (read, read + 1):
        raise VersionTakenError


def commit_actions(
    table: DeltaTable, operation: str, properties: CommitProperties, actions: Iterable[Mapping[str, Any]]
) -> None:
    """Commit as exactly the version after that of the handle, and move the handle to the new version.

    Flushes the commit to disk. Writes a checkpoint every CHECKPOINT_EVERY versions (in an object store:
    STORE_CHECKPOINT_EVERY). Raises VersionTakenError if that version exists; LakeError, LakeUnavailableError.
    """
    uri, version = table.table_uri, int(table.version()) + 1
    with storage_errors(uri):
        if not put_version(uri, version, operation, properties, actions):
            raise VersionTakenError
        durable.flush_commits(uri, version - 1, version, with_files=False)
    table.update_incremental()
    if version % (STORE_CHECKPOINT_EVERY if is_object_store(uri) else CHECKPOINT_EVERY) == 0:
        write_checkpoint(table)


def removed(file: LiveFile, *, changes_data: bool = True) -> dict[str, Any]:
    """Return the log's `remove` action for a file, with its vector if it has one."""
    vector = file.vector
    return {
        "remove": {
            "path": file.action["path"],
            "deletionTimestamp": int(time.time() * 1000),
            "dataChange": changes_data,
            "extendedFileMetadata": True,
            "partitionValues": file.action["partitionValues"],
            "size": file.size,
            **({} if vector is None else {"deletionVector": vector.to_action()}),
        }
    }


def written_bytes(uri: str, after: int, upto: int) -> int:
    """Return the bytes that the versions after `after`, up to and including `upto`, have written.

    Counts their commit files, new data files and vectors. Raises LakeError, LakeUnavailableError.
    """
    total = 0
    with storage_errors(uri):
        for version in range(after + 1, upto + 1):
            content = read_commit(uri, version) or b""
            total += len(content) + _bytes_of(json.loads(line) for line in content.splitlines() if line)
    return total


def _bytes_of(actions: Iterable[Mapping[str, Any]]) -> int:
    actions = list(actions)
    before = {action["remove"]["path"] for action in actions if "remove" in action}
    added = [LiveFile(action["add"]) for action in actions if "add" in action]
    # A file that gets another vector is added again, but not written again.
    data = sum(file.size for file in added if file.action["path"] not in before)
    ends: dict[str, int] = {}
    for file in added:
        if file.vector is not None and file.action["path"] in before and (path := file.vector.path):
            ends[path] = max(ends.get(path, 0), file.vector.end)
    return data + sum(ends.values())
