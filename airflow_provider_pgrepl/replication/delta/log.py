"""A commit of a Delta table written by ourselves: one put, which the store takes or refuses.

deltalake 1.6 cannot say all that ours say; and it looks at the log before and after a commit, which in a
store are ten exchanges, each of which waits for the one before.

Which commit that deltalake made is one's own.
A client puts a commit again when the answer to the first put was lost or was an error. The second put then
finds the version taken, by what the first has put, and deltalake says that another writer was first.
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
from airflow_provider_pgrepl.replication.storage.errors import facts_in, system_errors
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_path,
    open_storage,
    read_commit,
    read_commit_actions,
)

_KNOWN_FEATURES = {"appendOnly", "invariants", "timestampNtz", "deletionVectors"}
_CHECKED_VALUES = ('"nullable":false', '"delta.invariants"')
"""Of a schema by which writers are to reject rows, which we do not; lake tables have neither."""
_OLD_WRITER = 2
"""The newest version of writers of which a table without features demands only what we do."""
_TOKEN = "pgrepl_commit"  # noqa: S105 - of a commit


def can_commit(table: DeltaTable) -> bool:
    """Whether we do all that the table demands of its writers. What it demands more, deltalake may do."""
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


def added_action(file: AddAction) -> dict[str, Any]:
    """The log's line for a file that comes, as deltalake's own has it."""
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


def put_version(
    uri: str,
    version: int,
    operation: str,
    properties: CommitProperties,
    actions: Iterable[Mapping[str, Any]],
) -> bool:
    """Commit as this very version with what properties of deltalake's say; as `put_commit` in all else.

    App ids come last, in their order: a commit that was cut off has none of them.
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
    """Commit as this very version of a table, unless somebody has: then nothing happens. Whether it did.

    The store decides who of several is first (a hard link on a file system, a conditional put elsewhere).
    `about`: what is told of the commit. Raises OSError; the commit may be there nevertheless.
    """
    # Nobody else's commit is the same, byte for byte.
    first = {"commitInfo": {**about, "txnId": uuid.uuid4().hex}}
    lines = [json.dumps(action, separators=(",", ":")) for action in (first, *actions)]
    content = "\n".join(lines).encode()
    refused: OSError | None = None
    try:
        _put(uri, version, content)
    except AlreadyExistsError:
        # A put whose answer was lost is tried again by the client, and then finds what it has put.
        return read_commit(uri, version) == content
    except BaseError as error:
        refused = _refused(f"version {version} of the log of {uri}", error)
    if refused is not None:
        raise refused
    return True


def _refused(what: str, error: BaseError) -> OSError:
    """With the system's number, or the store's code: the store's answer may hold what we sent."""
    for number in system_errors(error):
        return OSError(number, os.strerror(number), what)
    return OSError(f"{what} could not be put: {type(error).__name__} {facts_in(error)}")


def _put(uri: str, version: int, content: bytes) -> None:
    if (local := local_path(uri)) is not None:
        obstore.put(LocalStore(local), commit_path("", version).lstrip("/"), content, mode="create")
        return
    filesystem, root = open_storage(uri)
    objects.create_commit(filesystem, commit_path(root, version), content)


def commit_token() -> dict[str, str]:
    """For the metadata of one commit, by which no other has the same."""
    return {_TOKEN: uuid.uuid4().hex}


@contextmanager
def committing(table: DeltaTable, properties: CommitProperties) -> Iterator[None]:
    """Commit once through a handle. Raises CommitFailedError when another writer was first, and what else
    deltalake does; OSError."""
    try:
        yield
    except CommitFailedError:
        if not _has_landed(table, properties):
            raise
        table.update_incremental()


def _has_landed(table: DeltaTable, properties: CommitProperties) -> bool:
    """Whether a commit with these properties is one of those after the version where the handle stands.

    On a file system a commit is made once, and its outcome is known.
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
