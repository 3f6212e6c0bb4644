"""Object stores, opened once for each bucket and its credentials."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from pyarrow import fs

from airflow_provider_pgrepl.replication.settings import store_variables
from airflow_provider_pgrepl.replication.settings.lake import AZURE, GOOGLE, S3, StoreLocation, store_location
from airflow_provider_pgrepl.replication.settings.store_variables import StoreVariables
from airflow_provider_pgrepl.replication.storage.stores.amazon import AmazonAccess
from airflow_provider_pgrepl.replication.storage.stores.azure import AzureAccess
from airflow_provider_pgrepl.replication.storage.stores.base import StoreAccess
from airflow_provider_pgrepl.replication.storage.stores.google import GoogleAccess

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_KINDS: Mapping[str, tuple[StoreVariables, Callable[[StoreLocation], StoreAccess]]] = {
    S3: (store_variables.AMAZON, AmazonAccess.of),
    GOOGLE: (store_variables.GOOGLE, GoogleAccess.of),
    AZURE: (store_variables.AZURE, AzureAccess.of),
}
_behind: dict[int, tuple[fs.FileSystem, StoreAccess]] = {}
"""By the id of Arrow's filesystem, which is kept here, so that no other object gets the same id."""


def access_to(place: StoreLocation) -> StoreAccess:
    """Return the endpoint and credentials of a location in a store. Raises OSError.

    The scheme must be supported. From then on `store_variables` includes the variables of this kind of store.
    """
    kind, access = _KINDS[place.scheme]
    store_variables.reach(kind)
    return access(place)


@cache
def open_filesystem(access: StoreAccess) -> fs.FileSystem:
    """Return Arrow's filesystem, in which the bucket is a folder. Raises OSError."""
    filesystem = access.filesystem()
    _behind[id(filesystem)] = filesystem, access
    return filesystem


@lru_cache(maxsize=8)
def open_store(access: StoreAccess, patience: timedelta | None = None) -> ObjectStore:
    """Return obstore's client, for conditional puts and for single requests. Raises BaseError.

    The client is cached, and keeps its connections. `patience` as in `Access.store`.
    """
    return access.store(patience)


def store_behind(filesystem: fs.FileSystem) -> ObjectStore:
    """Return obstore's client for a filesystem that `open_filesystem` returned. Raises BaseError."""
    return open_store(_behind[id(filesystem)][1])


def is_store(filesystem: fs.FileSystem) -> bool:
    """Return True if a filesystem is that of an object store, where each request takes time and money."""
    return id(filesystem) in _behind


def store_options(uri: str) -> dict[str, str]:
    """Return deltalake's storage options for a URI; an empty dict for a directory. Raises OSError."""
    place = store_location(uri)
    return {} if place is None else access_to(place).delta_options()
