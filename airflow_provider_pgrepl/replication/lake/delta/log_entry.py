"""Commits that we write into a table's log ourselves, where deltalake cannot say what they are to say.

deltalake 1.6 has no words for a deletion vector, and where it sets a table property it declares features
that the table does not use (variantType), for which other readers then refuse it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile
from airflow_provider_pgrepl.replication.lake.delta.parquet_files import WrittenFile
from airflow_provider_pgrepl.replication.lake_location import is_object_store
from airflow_provider_pgrepl.replication.storage import durable, put_commit, storage_errors

log = logging.getLogger(__name__)

CHECKPOINT_EVERY, STORE_CHECKPOINT_EVERY = 100, 20
"""Versions, the first as deltalake has it for its own commits. Who opens a table reads each since then, in a
store by a request."""

_KNOWN_FEATURES = {"appendOnly", "invariants", "timestampNtz", "deletionVectors"}
_OLD_WRITER = 2
"""The newest version of writers of which a table without features demands only what we do."""


class VersionTakenError(Exception):
    """Somebody has committed since the handle was opened: what was to be said may not hold any more."""


def can_commit(table: DeltaTable) -> bool:
    """Whether we do all that the table demands of its writers. What it demands more, deltalake may do."""
    protocol = table.protocol()
    if table.metadata().configuration.get("delta.appendOnly", "false").lower() == "true":
        return False
    if protocol.writer_features is None:
        return int(protocol.min_writer_version) <= _OLD_WRITER
    return set(protocol.writer_features) <= _KNOWN_FEATURES


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
    uri, version, now = table.table_uri, int(table.version()) + 1, int(time.time() * 1000)
    about = {
        "timestamp": now,
        "operation": operation,
        "operationParameters": {},
        "engineInfo": f"airflow-provider-pgrepl/{__version__}",
        **(properties.custom_metadata or {}),
    }
    apps = [
        {"txn": {"appId": app.app_id, "version": app.version, "lastUpdated": now}}
        for app in properties.app_transactions or []
    ]
    with storage_errors(uri):
        if not put_commit(uri, version, about, [*apps, *actions]):
            raise VersionTakenError
        durable.flush_commits(uri, version - 1, version, with_files=False)
    table.update_incremental()
    if version % (STORE_CHECKPOINT_EVERY if is_object_store(uri) else CHECKPOINT_EVERY) == 0:
        _checkpoint(table)


def _checkpoint(table: DeltaTable) -> None:
    """What has been committed stays so without; maintenance writes the checkpoint then."""
    try:
        table.create_checkpoint()
    except (DeltaError, OSError) as error:
        log.warning("%s: no checkpoint could be written: %s", table.table_uri, type(error).__name__)


def metadata_action(
    table: DeltaTable,
    properties: Mapping[str, str],
    schema: Schema | None = None,
    partition_columns: Sequence[str] | None = None,
) -> dict[str, Any]:
    """The table's metadata, with some properties more, or with others than it had; by choice with another
    schema, partitioned by other columns."""
    held = table.metadata()
    return {
        "metaData": {
            "id": str(held.id),
            **{key: value for key in ("name", "description") if (value := getattr(held, key)) is not None},
            "format": {"provider": "parquet", "options": {}},
            "schemaString": (schema or table.schema()).to_json(),
            "partitionColumns": held.partition_columns
            if partition_columns is None
            else list(partition_columns),
            "configuration": {**held.configuration, **properties},
            "createdTime": held.created_time,
        }
    }


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


def added(file: WrittenFile, *, changes_data: bool = True) -> dict[str, Any]:
    """The log's line for a file that comes."""
    return {
        "add": {
            "path": file.path,
            "partitionValues": dict(file.partition_values),
            "size": file.size,
            "modificationTime": int(time.time() * 1000),
            "dataChange": changes_data,
            "stats": file.stats_json,
        }
    }
