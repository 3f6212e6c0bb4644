"""Object stores, opened once for each way to reach a bucket."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from pyarrow import fs

from airflow_provider_pgrepl.replication.settings import store_variables
from airflow_provider_pgrepl.replication.settings.lake import AZURE, GOOGLE, S3, Place, place_in_store
from airflow_provider_pgrepl.replication.settings.store_variables import Kind
from airflow_provider_pgrepl.replication.storage.stores.amazon import AmazonAccess
from airflow_provider_pgrepl.replication.storage.stores.azure import AzureAccess
from airflow_provider_pgrepl.replication.storage.stores.base import Access
from airflow_provider_pgrepl.replication.storage.stores.google import GoogleAccess

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_KINDS: Mapping[str, tuple[Kind, Callable[[Place], Access]]] = {
    S3: (store_variables.AMAZON, AmazonAccess.of),
    GOOGLE: (store_variables.GOOGLE, GoogleAccess.of),
    AZURE: (store_variables.AZURE, AzureAccess.of),
}
_behind: dict[int, tuple[fs.FileSystem, Access]] = {}
"""By the number of Arrow's filesystem, which is kept, so that no other gets it."""


def access_to(place: Place) -> Access:
    """How a place is reached, of a scheme that is supported. Raises OSError."""
    kind, access = _KINDS[place.scheme]
    store_variables.reach(kind)
    return access(place)


@cache
def open_filesystem(access: Access) -> fs.FileSystem:
    """Arrow's filesystem, in which the bucket is a folder. Raises OSError."""
    filesystem = access.filesystem()
    _behind[id(filesystem)] = filesystem, access
    return filesystem


@lru_cache(maxsize=8)
def open_store(access: Access, patience: timedelta | None = None) -> ObjectStore:
    """For a put on condition, and for one request each. Its connections are kept. Raises BaseError."""
    return access.store(patience)


def store_behind(filesystem: fs.FileSystem) -> ObjectStore:
    """The store of a filesystem that was opened here."""
    return open_store(_behind[id(filesystem)][1])


def is_store(filesystem: fs.FileSystem) -> bool:
    """Whether it is one of an object store: a request each takes its time and its price."""
    return id(filesystem) in _behind


def store_options(uri: str) -> dict[str, str]:
    """What deltalake is to be told of the store of a place; nothing of a directory. Raises OSError."""
    place = place_in_store(uri)
    return {} if place is None else access_to(place).delta_options()
