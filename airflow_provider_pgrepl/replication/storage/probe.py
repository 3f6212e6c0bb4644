"""Checks of a lake's storage before it is used: it exists, is usable, and is shared by all hosts.

Also measures how far this host's clock is ahead of the storage's clock. Files are deleted some minutes after
they were removed from a table: a host whose clock is ahead would delete them too early.
"""

from __future__ import annotations

import os
import re
import tempfile
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Self

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.settings.lake import store_location
from airflow_provider_pgrepl.replication.settings.stores import ENDPOINTS, StoreLocation

from . import objects
from .durable import local_path
from .errors import (
    NO_CONDITIONS,
    SLOW,
    StoreFault,
    explanation_of,
    find_store_fault,
    storage_errors,
    store_error_code,
)
from .filesystem import delete_files, open_storage
from .stores import access_to, is_store, open_store

if TYPE_CHECKING:
    from obstore.store import ObjectStore


_PATIENCE = timedelta(seconds=15)
_CREDENTIALS = (
    "check the key, the token or the client's secret in the environment, or the connection that lake_conn_id"
    f" names; and that {', '.join(ENDPOINTS)}, where one is set, begins with http:// or https://"
)
# The answer of a store, or of its token service. 408 and 429 are left out, because they ask for a retry.
_REFUSED = re.compile(r"non-2xx status code: (?!408|429)(4\d\d)")
_UNREACHED = StoreFault(
    "the store cannot be reached", f"check the network, and {', '.join(ENDPOINTS)} where one is set"
)
_HINT = (
    "mount one directory under this path on all hosts, which their users may write, or keep the lake in an"
    " object store"
)
UNKNOWN_MARGIN = timedelta(minutes=15)
"""The assumed lead of this host's clock if no file can be written into the storage to measure it."""


def check_store(lake_root: str) -> None:
    """Check that a store rejects a second conditional put of an object, and delete the object.

    The object is created below `_pgrepl`. Without such a rejection, two writers could commit the same
    version. Does nothing for a directory. Raises LakeError, LakeUnavailableError.
    """
    place = store_location(lake_root)
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
    """Check that a folder can be created at the location of a lake, and where the lake has its changelog.

    The folders are created in the nearest existing parent folders, and removed again. Does nothing for a
    store. Raises LakeError, LakeUnavailableError.
    """
    directory = local_path(lake_root)
    if directory is None:
        return
    with storage_errors(lake_root):
        for wanted in (directory, directory / "_pgrepl" / "changelog"):
            nearest = next(path for path in (wanted, *wanted.parents) if path.exists())
            with tempfile.TemporaryDirectory(prefix="_pgrepl_probe_", dir=nearest):
                pass


class _NotOpenedError(OSError):
    """The error of a store that could not be opened, before any request was sent."""


def _opened(place: StoreLocation) -> ObjectStore:
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
    fault = find_store_fault(error) or _refusal_in(error)
    if fault is None:
        fault = explanation_of(error) or _UNREACHED
        return LakeUnavailableError(f"{lake_root}: {fault.sentence}", _UNREACHED.hint)
    kind = LakeUnavailableError if fault == SLOW else LakeError
    return kind(f"{lake_root}: {fault.sentence}", fault.hint)


def _refusal_in(error: Exception) -> StoreFault | None:
    """Return the explanation of an unknown answer, or of a store that could not be opened.

    Returns None if the store did not answer, or asked for a retry.
    """
    if isinstance(error, _NotOpenedError):
        return StoreFault("credentials or endpoint are none that a store can be opened with", _CREDENTIALS)
    found, code = _REFUSED.search(str(error)), store_error_code(error)
    if found is None:
        return None
    if code:
        return StoreFault(
            f"the store refuses, with its code {code}", "the store's own documentation says why"
        )
    return StoreFault(f"what was asked there is refused, with status {found[1]}", _CREDENTIALS)


@dataclass(frozen=True)
class SharedDirectory:
    """A context in which a lake's directory holds a file that identifies it; a store needs no such file."""

    lake_root: str
    name: str = field(default_factory=lambda: f"_pgrepl_probe_{uuid.uuid4().hex}")

    def __enter__(self) -> Self:
        folder = local_path(self.lake_root)
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / self.name).touch()
            except OSError as error:
                raise _unwritable(folder, error) from None
        return self

    def __exit__(self, *_: object) -> None:
        folder = local_path(self.lake_root)
        if folder is not None:
            (folder / self.name).unlink(missing_ok=True)

    def check(self) -> None:
        """Check on any host that the lake root is the same writable directory, or a usable store.

        Raises LakeError, LakeUnavailableError.
        """
        folder = local_path(self.lake_root)
        if folder is None:
            check_store(self.lake_root)
            return
        try:
            if not (folder / self.name).exists():
                raise LakeError(f"{folder} is not the directory that the driver has there", _HINT)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise _unwritable(folder, error) from None


def _unwritable(folder: Path, error: OSError) -> LakeError:
    return LakeError(f"{folder} cannot be written: {error.strerror}", _HINT)


def doubt_of_absence(uri: str) -> str:
    """Return the reason why a folder may hold a Delta table although none was found, or "".

    Returns "" for an object store: its answer that there is no table is certain.
    """
    folder = local_path(uri)
    if folder is None:
        return ""
    try:
        if _exists(folder):
            return f"{folder} exists, and no table in it can be opened"
        while not _exists(folder):
            folder = folder.parent
        is_empty = next(folder.iterdir(), None) is None
    except OSError as error:
        return f"{folder} cannot be looked at: {os.strerror(error.errno or 0)}"
    return f"{folder} is empty, as the folder of a disk that is not mounted" if is_empty else ""


def is_there(uri: str) -> bool:
    """Return True if a folder of this host exists, or if this cannot be determined.

    Returns False for an object store, which has no folders.
    """
    folder = local_path(uri)
    try:
        return folder is not None and _exists(folder)
    except OSError:
        return True


def _exists(path: Path) -> bool:
    """Return True if a path exists. Raises OSError.

    Path.exists() would report a file that this process may not access as missing.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def storage_lead(folder: str, now: datetime) -> timedelta:
    """Return how far `now` is ahead of the storage's clock; zero if it is not ahead.

    Writes an empty file into `folder`, a private folder of this package, and deletes it. Returns
    UNKNOWN_MARGIN if that fails.
    """
    try:
        stamp = _stamp(folder)
    except OSError:
        return UNKNOWN_MARGIN
    return max(now - stamp, timedelta(0))


def _stamp(folder: str) -> datetime:
    filesystem, root = open_storage(folder)
    path = f"{root}/.clock-{uuid.uuid4().hex}"
    try:
        if is_store(filesystem):
            objects.put(filesystem, path, b"")
            found = objects.look_at(filesystem, path)
            stamp = found["last_modified"] if found is not None else datetime.now(UTC)
        else:
            filesystem.open_output_stream(path).close()
            stamp = filesystem.get_file_info(path).mtime
    finally:
        delete_files(filesystem, [path])
    return stamp
