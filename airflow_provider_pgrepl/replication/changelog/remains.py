"""The identity and the position of a changelog whose log is damaged, as of its last whole commit.

This module reads the log itself: deltalake does not open a table with a damaged log.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyarrow import fs

from airflow_provider_pgrepl.replication.delta.log import read_checkpoint, whole_checkpoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.storage import (
    log_path,
    open_storage,
    read_commit_actions,
    storage_errors,
)

from .layout import DURABLE_APP, SHARED_APP, EpochRecord


@dataclass(frozen=True)
class ReadableChangelog:
    """The readable part of a damaged changelog.

    `version`: that of the last whole commit before the damage, -1 if there is none. `lake_id` and `token` are
    those of `changelog.reader`.
    """

    version: int = -1
    record: EpochRecord | None = None
    lake_id: str = ""
    token: int = 0
    durable_lsn: LSN | None = None


def read_remains(uri: str, before: int | None) -> ReadableChangelog:
    """Read a changelog's log before a version (None: without a limit), up to the first gap or damage.

    Raises LakeError, LakeUnavailableError, and ChangelogError if the table is not a changelog.
    """

    def is_before(version: int) -> bool:
        return before is None or version < before

    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        entries = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
        checkpoints = whole_checkpoints(entries)
        version, actions = _checkpoint(filesystem, root, [one for one in checkpoints if is_before(one[0])])
        while is_before(version + 1) and (found := _commit(filesystem, root, version + 1)) is not None:
            actions += found
            version += 1
    apps = {action["txn"]["appId"]: action["txn"]["version"] for action in actions if "txn" in action}
    metadata = next((a["metaData"] for a in reversed(actions) if "metaData" in a), None)
    durable = apps.get(DURABLE_APP)
    return ReadableChangelog(
        version,
        None if metadata is None else EpochRecord.from_json(metadata.get("description")),
        "" if metadata is None else str(metadata["id"]),
        apps.get(SHARED_APP, 0),
        None if durable is None else LSN(durable),
    )


def _checkpoint(
    filesystem: fs.FileSystem, root: str, checkpoints: list[tuple[int, list[str]]]
) -> tuple[int, list[dict[str, Any]]]:
    for version, names in checkpoints:
        with suppress(pa.ArrowException, FileNotFoundError, ValueError):
            return version, list(read_checkpoint(filesystem, root, names, ("metaData", "txn")))
    return -1, []


def _commit(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]] | None:
    try:
        return read_commit_actions(filesystem, root, version)
    except (ValueError, FileNotFoundError):
        return None
