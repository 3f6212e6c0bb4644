"""Commits that we write into a table's log ourselves, where deltalake cannot say what they are to say.

deltalake 1.6 has no words for a deletion vector, and where it sets a table property it declares features
that the table does not use (variantType), for which other readers then refuse it.
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
"""Versions, the first as deltalake has it for its own commits. Who opens a table reads each since then, in a
store by a request."""


class VersionTakenError(Exception):
    """Somebody has committed since the handle was opened: what was to be said may not hold any more."""


def check_version(table: DeltaTable, read: int) -> None:
    """Raise VersionTakenError unless a table is as it was read at a version, but for a commit of its bounds.

    Such a commit takes in what others have committed right behind it: then files may be gone.
    """
    if int(table.version()) not in (read, read + 1):
        raise VersionTakenError


def commit_actions(
    table: DeltaTable, operation: str, properties: CommitProperties, actions: Iterable[Mapping[str, Any]]
) -> None:
    """Commit as the very next version after the one where the handle stands, which then stands there.

    Raises VersionTakenError, and what the storage does.
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
    """The log's line for a file that goes, with the vector that it had."""
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
    """Bytes, by the versions after one and up to another. Raises LakeUnavailableError."""
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
    # A file that gets another vector is named again, and is the same.
    data = sum(file.size for file in added if file.action["path"] not in before)
    ends: dict[str, int] = {}
    for file in added:
        if file.vector is not None and file.action["path"] in before and (path := file.vector.path):
            ends[path] = max(ends.get(path, 0), file.vector.end)
    return data + sum(ends.values())
