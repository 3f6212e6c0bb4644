"""A commit of a Delta table written by ourselves: one that says what deltalake's commits cannot."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, S3Store

from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.filesystem import commit_path, open_storage, read_commit
from airflow_provider_pgrepl.replication.storage.object_store import open_store


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
    refused = ""
    try:
        _put(uri, version, content)
    except AlreadyExistsError:
        # A put whose answer was lost is tried again by the client, and then finds what it has put.
        return read_commit(uri, version) == content
    except BaseError as error:
        # Its text tells the store's answer, which may hold what we sent.
        refused = type(error).__name__
    if refused:
        raise OSError(f"{uri}: version {version} of its log could not be written: {refused}")
    return True


def _put(uri: str, version: int, content: bytes) -> None:
    local = local_path(uri)
    store: LocalStore | S3Store
    if local is not None:
        store, path = LocalStore(local), commit_path("", version).lstrip("/")
    else:
        bucket, _, root = open_storage(uri)[1].partition("/")
        store, path = open_store(bucket), commit_path(root, version)
    obstore.put(store, path, content, mode="create")
