"""A commit of a Delta table written by ourselves: one that says what deltalake's commits cannot."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import LocalStore, from_url

from airflow_provider_pgrepl.replication.storage.durable import LOG_FOLDER, local_path


def put_commit(uri: str, version: int, actions: Iterable[Mapping[str, Any]]) -> bool:
    """Commit as this very version of a table, unless somebody has: then nothing happens. Whether it did.

    The store decides who of several is first (a hard link on a file system, a conditional put elsewhere).
    Raises OSError; the commit may be there nevertheless.
    """
    lines = [json.dumps(action, separators=(",", ":")) for action in actions]
    local = local_path(uri)
    store = from_url(uri) if local is None else LocalStore(local)
    refused = ""
    try:
        obstore.put(store, f"{LOG_FOLDER}/{version:020d}.json", "\n".join(lines).encode(), mode="create")
    except AlreadyExistsError:
        return False
    except BaseError as error:
        # Its text tells the store's answer, which may hold what we sent.
        refused = type(error).__name__
    if refused:
        raise OSError(f"{uri}: version {version} of its log could not be written: {refused}")
    return True
