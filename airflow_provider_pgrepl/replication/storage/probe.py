"""Whether a lake's store can be used, asked before anything relies on it."""

from __future__ import annotations

import re
import tempfile
import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.settings.lake import Place, place_in_store
from airflow_provider_pgrepl.replication.settings.store_variables import (
    AZURE_ENDPOINT,
    ENDPOINT,
    GOOGLE_ENDPOINT,
)
from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.durable import local_path
from airflow_provider_pgrepl.replication.storage.errors import NO_CONDITIONS, SLOW, Fault, code_in, fault_of
from airflow_provider_pgrepl.replication.storage.filesystem import open_storage
from airflow_provider_pgrepl.replication.storage.refusal import storage_errors
from airflow_provider_pgrepl.replication.storage.stores.object_store import access_to, open_store

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PATIENCE = timedelta(seconds=15)
_ENDPOINTS = (ENDPOINT, GOOGLE_ENDPOINT, AZURE_ENDPOINT)
_CREDENTIALS = (
    "check the key, the token or the client's secret in the environment, or the connection that lake_conn_id"
    f" names; and that {', '.join(_ENDPOINTS)}, where one is set, begins with http:// or https://"
)
# Of a store, or of who gives tokens for it. Two of them mean to come again.
_REFUSED = re.compile(r"non-2xx status code: (?!408|429)(4\d\d)")
_UNREACHED = Fault(
    "the store cannot be reached", f"check the network, and {', '.join(_ENDPOINTS)} where one is set"
)


def check_store(lake_root: str) -> None:
    """Put an object beside the lake's tables, have a second put of it refused, and delete it.

    Commits are safe against another writer only where a store refuses that. Nothing is asked of a directory.
    Raises LakeError, LakeUnavailableError.
    """
    place = place_in_store(lake_root)
    if place is None:
        return
    name = f"_pgrepl/probe-{uuid.uuid4().hex}"
    path = f"{place.key}/{name}"
    failed: Exception | None = None
    try:
        store = _opened(place)
        obstore.put(store, path, b"", mode="create")
        try:
            is_refused = _is_refused(store, path)
        finally:
            filesystem, root = open_storage(lake_root)
            objects.delete(filesystem, [f"{root}/{name}"])
    except (BaseError, OSError) as error:
        failed = error
    if failed is not None:
        raise _unusable(lake_root, failed)
    if not is_refused:
        raise LakeError(f"{lake_root}: {NO_CONDITIONS.sentence}", NO_CONDITIONS.hint)


def check_directory(lake_root: str) -> None:
    """Make a folder where the directory of a new lake will be, and remove it. Nothing is asked of a store.

    Raises LakeError, LakeUnavailableError.
    """
    directory = local_path(lake_root)
    if directory is None:
        return
    with storage_errors(lake_root):
        nearest = next(path for path in (directory, *directory.parents) if path.exists())
        with tempfile.TemporaryDirectory(prefix="_pgrepl_probe_", dir=nearest):
            pass


class _NotOpenedError(OSError):
    """Before anything was asked of a store."""


def _opened(place: Place) -> ObjectStore:
    access = access_to(place)
    try:
        return open_store(access, _PATIENCE)
    except BaseError as error:
        raise _NotOpenedError(type(error).__name__) from None


def _is_refused(store: ObjectStore, path: str) -> bool:
    try:
        obstore.put(store, path, b"", mode="create")
    except AlreadyExistsError:
        return True
    return False


def _unusable(lake_root: str, error: Exception) -> LakeError:
    fault = fault_of(error) or _refusal_in(error)
    if fault is None:
        return LakeUnavailableError(f"{lake_root}: {_UNREACHED.sentence}", _UNREACHED.hint)
    kind = LakeUnavailableError if fault == SLOW else LakeError
    return kind(f"{lake_root}: {fault.sentence}", fault.hint)


def _refusal_in(error: Exception) -> Fault | None:
    """What was answered, and means nothing that is known here; None where nobody has answered."""
    if isinstance(error, _NotOpenedError):
        return Fault("credentials or endpoint are none that a store can be opened with", _CREDENTIALS)
    found, code = _REFUSED.search(str(error)), code_in(error)
    if found is None:
        return None
    if code:
        return Fault(f"the store refuses, with its code {code}", "the store's own documentation says why")
    return Fault(f"what was asked there is refused, with status {found[1]}", _CREDENTIALS)
