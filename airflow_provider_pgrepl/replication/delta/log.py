"""Commits of Delta tables: written by this package with one put, or by deltalake and then verified.

deltalake 1.6 cannot write all actions that this package's commits need. It also reads the log before and
after a commit: in a store, 10 requests one after the other.

A store's client repeats the put of a commit if the answer to the first put was lost or an error. The second
put then finds the version that the first one created, and deltalake reports a conflict with another writer.
`committing` recognizes such a commit as its own.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import obstore
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.errors import parsable_parts, system_errors
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_path,
    open_storage,
    read_commit,
    read_commit_actions,
)

_KNOWN_FEATURES = {"appendOnly", "invariants", "timestampNtz", "deletionVectors"}
_CHECKED_VALUES = ('"nullable":false', '"delta.invariants"')
"""Parts of a schema that require writers to reject rows, which this module does not do. Lake tables have
none."""
_OLD_WRITER = 2
"""The newest writer version without table features whose requirements this module fulfills."""
_TOKEN = "pgrepl_commit"  # noqa: S105 - of a commit


def can_commit(table: DeltaTable) -> bool:
    """Return True if this module fulfills all requirements of the table for writers.

    Otherwise deltalake may still be able to write the table.
    """
    protocol = table.protocol()
    if table.metadata().configuration.get("delta.appendOnly", "false").lower() == "true":
        return False
    if any(mark in table.schema().to_json() for mark in _CHECKED_VALUES):
        return False
    if protocol.writer_features is None:
        return int(protocol.min_writer_version) <= _OLD_WRITER
    return set(protocol.writer_features) <= _KNOWN_FEATURES


def metadata_action(
    table: DeltaTable,
    properties: Mapping[str, str],
    schema: Schema | None = None,
    partition_columns: Sequence[str] | None = None,
    description: str | None = None,
) -> dict[str, Any]:
    """Return the action that sets the table's metadata, with these properties added or replaced.

    `schema`, `partition_columns`, `description`: the new ones; default: unchanged.
    """
    held = table.metadata()
    texts = {"name": held.name, "description": held.description if description is None else description}
    return {
        "metaData": {
            "id": str(held.id),
            **{key: value for key, value in texts.items() if value is not None},
            "format": {"provider": "parquet", "options": {}},
            "schemaString": (schema or table.schema()).to_json(),
            "partitionColumns": held.partition_columns
            if partition_columns is None
            else list(partition_columns),
            "configuration": {**held.configuration, **properties},
            "createdTime": held.created_time,
        }
    }


def added_action(file: AddAction) -> dict[str, Any]:
    """Return the log action that adds a file, in the form that deltalake writes."""
    return {
        "add": {
            "path": file.path,
            "partitionValues": dict(file.partition_values),
            "size": file.size,
            "modificationTime": file.modification_time,
            "dataChange": file.data_change,
            "stats": file.stats,
        }
    }


def removed_action(path: str) -> dict[str, Any]:
    """Return the log action that removes a file without partition values and deletion vector."""
    return {"remove": {"path": path, "deletionTimestamp": int(time.time() * 1000), "dataChange": True}}


def put_version(
    uri: str,
    version: int,
    operation: str,
    properties: CommitProperties,
    actions: Iterable[Mapping[str, Any]],
) -> bool:
    """Commit as exactly this version, with the metadata and app IDs of deltalake's `properties`.

    The app IDs come last, in their order: a truncated commit lacks the last one. Returns and raises as
    `put_commit`.
    """
    now = int(time.time() * 1000)
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
    return put_commit(uri, version, about, [*actions, *apps])


def put_commit(
    uri: str, version: int, about: Mapping[str, Any], actions: Iterable[Mapping[str, Any]]
) -> bool:
    """Commit as exactly this version of a table. Returns False if another commit has this version.

    The storage lets one of several writers succeed (by a hard link on a file system, by a conditional put in
    a store). `about`: the content of `commitInfo`. Raises OSError; the commit may nevertheless exist.
    """
    # The random ID makes the bytes of this commit unique.
    first = {"commitInfo": {**about, "txnId": uuid.uuid4().hex}}
    lines = [json.dumps(action, separators=(",", ":")) for action in (first, *actions)]
    content = "\n".join(lines).encode()
    refused: OSError | None = None
    try:
        _put(uri, version, content)
    except AlreadyExistsError:
        # The client repeats a put whose answer was lost, and then finds its own commit.
        return read_commit(uri, version) == content
    except BaseError as error:
        refused = _refused(f"version {version} of the log of {uri}", error)
    if refused is not None:
        raise refused
    return True


def _refused(what: str, error: BaseError) -> OSError:
    """Return an OSError with the system's error number or the store's error code.

    The store's answer is left out: it may contain the request.
    """
    for number in system_errors(error):
        return OSError(number, os.strerror(number), what)
    return OSError(f"{what} could not be put: {type(error).__name__} {parsable_parts(error)}")


def _put(uri: str, version: int, content: bytes) -> None:
    if (local := local_path(uri)) is not None:
        obstore.put(LocalStore(local), commit_path("", version).lstrip("/"), content, mode="create")
        return
    filesystem, root = open_storage(uri)
    objects.create_commit(filesystem, commit_path(root, version), content)


def commit_token() -> dict[str, str]:
    """Return a unique token for the metadata of one commit."""
    return {_TOKEN: uuid.uuid4().hex}


@contextmanager
def committing(table: DeltaTable, properties: CommitProperties) -> Iterator[None]:
    """Run a block that commits once through a handle, with these `properties`.

    A conflict with the handle's own commit is not an error; the handle is then updated. Raises
    CommitFailedError if another writer was first, other errors of deltalake, OSError.
    """
    try:
        yield
    except CommitFailedError:
        if not _has_landed(table, properties):
            raise
        table.update_incremental()


def _has_landed(table: DeltaTable, properties: CommitProperties) -> bool:
    """Return True if a commit after the handle's version has the token of these properties.

    Returns False for a file system, where a commit is tried once and its outcome is known.
    """
    uri, token = str(table.table_uri), (properties.custom_metadata or {}).get(_TOKEN)
    if token is None or local_path(uri) is not None:
        return False
    filesystem, root = open_storage(uri)
    version = int(table.version())
    while True:
        version += 1
        try:
            actions = read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return False
        if any(action.get("commitInfo", {}).get(_TOKEN) == token for action in actions):
            return True
