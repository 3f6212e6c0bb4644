"""Commits and checkpoints of Delta tables. Commits are written by this package with one put, or by deltalake
and then verified.

deltalake 1.6 cannot write all actions that this package's commits need. It also reads the log before and
after a commit: in a store, 10 requests one after the other.

A store's client repeats the put of a commit if the answer to the first put was lost or an error. The second
put then finds the version that the first one created, and deltalake reports a conflict with another writer.
`committing` recognizes such a commit as its own.

Checkpoints are single files, multi-part, or V2. A V2 checkpoint has a random name and may be JSON. Its
actions are in sidecars, which are files in a folder of the log, or in the checkpoint itself.
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import obstore
from deltalake import CommitProperties, DeltaTable, Schema
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore
from pyarrow import fs

from airflow_provider_pgrepl import __version__
from airflow_provider_pgrepl.replication.storage import durable, objects
from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.errors import parsable_parts, system_errors
from airflow_provider_pgrepl.replication.storage.filesystem import (
    commit_path,
    log_path,
    open_file,
    open_parquet,
    open_storage,
    read_commit,
    read_commit_actions,
)

from .table import open_delta

_KNOWN_FEATURES = {"appendOnly", "invariants", "timestampNtz", "deletionVectors"}
_CHECKED_VALUES = ('"nullable":false', '"delta.invariants"')
"""Parts of a schema that require writers to reject rows, which this module does not do. Lake tables have
none."""
_OLD_WRITER = 2
"""The newest writer version without table features whose requirements this module fulfills."""
_TOKEN = "pgrepl_commit"  # noqa: S105 - of a commit
log = logging.getLogger(__name__)
_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(?:\.\d{10}\.(\d{10})|\.[0-9a-fA-F-]{36}(?=\.))?\.parquet")
_JSON_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint\.[0-9a-fA-F-]{36}\.json()")
_SIDECARS, _SIDECAR = "_sidecars", "sidecar"
_ANY_SIZE = 2**63 - 1


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
    return local_path(str(table.table_uri)) is None and _find_landed(table, properties) is not None


def flush_landed(table: DeltaTable, properties: CommitProperties) -> None:
    """Flush the commit with the token of these properties, as `durable.flush_newest` does. Raises OSError.

    `table`: the handle, which is still at a version before that commit.
    """
    uri = str(table.table_uri)
    if local_path(uri) is not None:
        durable.flush_newest(uri, _find_landed(table, properties))


def _find_landed(table: DeltaTable, properties: CommitProperties) -> int | None:
    token = (properties.custom_metadata or {}).get(_TOKEN)
    if token is None:
        return None
    filesystem, root = open_storage(str(table.table_uri))
    version = int(table.version())
    while True:
        version += 1
        try:
            actions = read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return None
        if any(action.get("commitInfo", {}).get(_TOKEN) == token for action in actions):
            return version


class Checkpoints:
    """The writer of checkpoints of a table, one for every `every` versions, in a thread.

    A reader that opens the table reads all commits since the last checkpoint.
    """

    def __init__(self, uri: str, every: int) -> None:
        self._uri, self._every = uri, every
        self._writing: threading.Thread | None = None

    def after(self, before: int, version: int) -> None:
        """Start a checkpoint of a flushed version if `before` and `version` are on different sides of a
        multiple of `every`. Does nothing while the previous checkpoint is being written."""
        if version // self._every == before // self._every:
            return
        if self._writing is None or not self._writing.is_alive():
            # Not a daemon thread, so that the process waits for it at exit: deltalake in a running daemon
            # thread would crash the process.
            self._writing = threading.Thread(target=self._write, args=(version,), name="pgrepl-checkpoint")
            self._writing.start()

    def _write(self, version: int) -> None:
        """Write a checkpoint of exactly this version: a newer one may not be on disk, and be set aside."""
        with _warn_of_failed_checkpoint(self._uri):
            write_checkpoint(open_delta(self._uri, version))


def write_checkpoint(table: DeltaTable) -> None:
    """Write a checkpoint of the handle's version, which must be on disk, and flush it.

    Errors are only logged: the commits are valid without a checkpoint.
    """
    with _warn_of_failed_checkpoint(table.table_uri):
        table.create_checkpoint()
        durable.flush_checkpoint(table.table_uri, table.version())


@contextmanager
def _warn_of_failed_checkpoint(uri: str) -> Iterator[None]:
    try:
        yield
    except (DeltaError, OSError) as error:
        log.warning("%s: no checkpoint could be written: %s", uri, type(error).__name__)


def checkpoint_version(name: str) -> int | None:
    """Return the version of the checkpoint to which a log file of this name belongs; None for other files."""
    match = _match(name)
    return int(match[1]) if match else None


def _match(name: str) -> re.Match[str] | None:
    return _CHECKPOINT.fullmatch(name) or _JSON_CHECKPOINT.fullmatch(name)


def whole_checkpoints(entries: Iterable[fs.FileInfo]) -> list[tuple[int, list[str]]]:
    """Return the checkpoints whose parts are all among a log's files, and not empty.

    Newest first: the version, and the names of the parts.
    """
    parts: dict[tuple[int, int], list[str]] = {}
    whole: dict[int, list[str]] = {}
    for info in entries:
        match = _match(info.base_name)
        if match is None or not info.size:
            continue
        version = int(match[1])
        if match[2]:
            parts.setdefault((version, int(match[2])), []).append(info.base_name)
        else:
            whole[version] = [info.base_name]
    whole |= {version: names for (version, count), names in sorted(parts.items()) if len(names) == count}
    return sorted(whole.items(), reverse=True)


def read_checkpoint(
    filesystem: fs.FileSystem, root: str, names: Sequence[str], kinds: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Yield the actions of these kinds, each under its kind, from the checkpoint files `names`.

    `root`: the table's path in its filesystem. Raises FileNotFoundError, OSError, and ValueError or
    ArrowException for an incomplete checkpoint.
    """
    for name in names:
        for action in _actions(filesystem, f"{log_path(root)}/{name}", (*kinds, _SIDECAR)):
            if _SIDECAR in action:
                yield from _actions(filesystem, _sidecar_path(root, action), kinds)
            else:
                yield action


def sidecars(filesystem: fs.FileSystem, root: str, name: str) -> list[str]:
    """Return the paths of the sidecars that a checkpoint file names. Raises as `read_checkpoint`."""
    named = _actions(filesystem, f"{log_path(root)}/{name}", (_SIDECAR,))
    return [_sidecar_path(root, action) for action in named if action]


def _sidecar_path(root: str, action: dict[str, Any]) -> str:
    """Return a sidecar's path. All sidecars are in one folder; only the name in the action is used."""
    return f"{log_path(root)}/{_SIDECARS}/{unquote(action[_SIDECAR]['path']).rpartition('/')[2]}"


def _actions(filesystem: fs.FileSystem, path: str, kinds: Sequence[str]) -> Iterator[dict[str, Any]]:
    with open_file(filesystem, path, _ANY_SIZE) as source:
        if path.endswith(".json"):
            for line in source.read().splitlines():
                yield {kind: action for kind, action in json.loads(line).items() if kind in kinds}
            return
        with open_parquet(filesystem, source) as parquet:
            held = [kind for kind in kinds if kind in parquet.schema_arrow.names]
            rows = parquet.read(columns=held)
    for kind in held:
        yield from ({kind: action} for action in rows[kind].to_pylist() if action is not None)
