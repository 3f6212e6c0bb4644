"""Whether a lake's store can be used, asked before anything relies on it."""

from __future__ import annotations

import uuid
from datetime import timedelta
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.lake_location import place_in_store
from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.filesystem import open_storage
from airflow_provider_pgrepl.replication.storage.object_store import access_to, open_store
from airflow_provider_pgrepl.replication.storage.store_faults import (
    NO_CONDITIONS,
    SLOW,
    Fault,
    fault_of,
)
from airflow_provider_pgrepl.replication.store_variables import AZURE_ENDPOINT, ENDPOINT, GOOGLE_ENDPOINT

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_PATIENCE = timedelta(seconds=15)
_ENDPOINTS = (ENDPOINT, GOOGLE_ENDPOINT, AZURE_ENDPOINT)
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
        store = open_store(access_to(place), _PATIENCE)
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


def _is_refused(store: ObjectStore, path: str) -> bool:
    try:
        obstore.put(store, path, b"", mode="create")
    except AlreadyExistsError:
        return True
    return False


def _unusable(lake_root: str, error: Exception) -> LakeError:
    known = fault_of(error)
    fault = known or _UNREACHED
    kind = LakeUnavailableError if known in (None, SLOW) else LakeError
    return kind(f"{lake_root}: {fault.sentence}", fault.hint)
