"""Operations on a store's objects with one request each; Arrow's filesystem sends more, also for folders.

`filesystem` is Arrow's filesystem of the store, as `open_storage` returns it. `path` is always bucket and
key.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import obstore
import pyarrow as pa
from obstore.exceptions import BaseError, GenericError
from pyarrow import fs

from .errors import find_store_fault, parsable_parts
from .stores import access_behind, store_behind

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_MARK_S, _MARKS = 1.0, 4096
_Known = tuple[int, str]
"""The id of a filesystem, and the path in it."""
_marks: dict[_Known, tuple[str, float]] = {}
_COMMITS, _COMMIT_BYTES = 64, 64 << 10
_commits: dict[_Known, tuple[bytes, float]] = {}
"""Commits that this process has written or read, cached for 1 s: a merge reads a commit several times."""


def read_commit(filesystem: fs.FileSystem, path: str) -> bytes:
    """Read the object of a commit; the result is cached for 1 s. Raises FileNotFoundError, OSError."""
    content, until = _commits.get((id(filesystem), path), (b"", 0.0))
    if time.monotonic() >= until:
        content = read(filesystem, path)
        _keep((id(filesystem), path), content)
    return content


def read(filesystem: fs.FileSystem, path: str) -> bytes:
    """Read an object. Raises FileNotFoundError, OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        return bytes(obstore.get(store, key).bytes())


def open_reader(filesystem: fs.FileSystem, path: str) -> pa.NativeFile:
    """Open an object for random access. Raises FileNotFoundError, OSError.

    Used instead of Arrow's reader for a store with `opens_by_requests`. Arrow's reader for Azure aborts the
    process if it cannot get a token: Arrow does not catch the exception of Azure's client.
    """
    found = look_at(filesystem, path)
    if found is None:
        raise FileNotFoundError(f"{path} is not there")
    return pa.PythonFile(_Reader(filesystem, path, found["size"]), mode="r")


class _Reader(io.RawIOBase):
    """A file that reads an object with one range request for each read."""

    def __init__(self, filesystem: fs.FileSystem, path: str, size: int) -> None:
        super().__init__()
        self._filesystem, self._path, self._size, self._at = filesystem, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._size - self._at)
        length = left if size is None or size < 0 else min(size, left)
        found = read_range(self._filesystem, self._path, self._at, length) if length else b""
        self._at += len(found)
        return found


def read_range(filesystem: fs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Read `length` bytes of an object, or fewer at its end. Raises FileNotFoundError, OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        return bytes(obstore.get_range(store, key, start=offset, length=length))


def look_at(filesystem: fs.FileSystem, path: str) -> ObjectMeta | None:
    """Return an object's metadata, or None if it does not exist. Raises OSError."""
    store, key = _of(filesystem, path)
    try:
        with _store_errors(path):
            return obstore.head(store, key)
    except FileNotFoundError:
        return None


def mark_of(filesystem: fs.FileSystem, path: str) -> str:
    """Return an object's size and ETag as one text, or "" if the object is missing or empty.

    Another object at the same path has another mark. The mark is cached for 1 s, because one merge requests
    it often. Raises OSError.
    """
    known = id(filesystem), path
    mark, until = _marks.get(known, ("", 0.0))
    if time.monotonic() < until:
        return mark
    found = look_at(filesystem, path)
    if found is None or not found["size"]:
        _forget(known)
        return ""
    return _remember(known, found["size"], found["e_tag"])


def create_commit(filesystem: fs.FileSystem, path: str, content: bytes) -> None:
    """Put a commit unless it exists, and cache it for 1 s.

    Raises AlreadyExistsError and other subclasses of BaseError of the store's client; OSError if the store
    cannot be opened.
    """
    store, key = _of(filesystem, path)
    mark = obstore.put(store, key, content, mode="create")["e_tag"]
    _remember((id(filesystem), path), len(content), mark)
    _keep((id(filesystem), path), content)


def _keep(known: _Known, content: bytes) -> None:
    if len(content) <= _COMMIT_BYTES:
        if len(_commits) >= _COMMITS:
            _commits.clear()
        _commits[known] = content, time.monotonic() + _MARK_S


def _remember(known: _Known, size: int, e_tag: str | None) -> str:
    if len(_marks) >= _MARKS:
        _marks.clear()
    mark = f"{size}@{e_tag}"
    _marks[known] = mark, time.monotonic() + _MARK_S
    return mark


def put(filesystem: fs.FileSystem, path: str, content: bytes) -> None:
    """Put an object, and replace an existing one. Raises OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        obstore.put(store, key, content)


def delete(filesystem: fs.FileSystem, paths: Iterable[str]) -> None:
    """Delete objects of one bucket in batch requests. Missing objects are not an error. Raises OSError."""
    paths = list(paths)
    for path in paths:
        _forget((id(filesystem), path))
    keys = [_of(filesystem, path)[1] for path in paths]
    if keys:
        with _store_errors(paths[0]):
            _delete(filesystem, paths[0].partition("/")[0], keys)


def delete_below(filesystem: fs.FileSystem, path: str) -> None:
    """Delete all objects whose keys are below a path. Raises OSError."""
    _marks.clear()
    _commits.clear()
    store, key = _of(filesystem, path)
    with _store_errors(path):
        for listed in obstore.list(store, f"{key.strip('/')}/", chunk_size=1000):
            _delete(filesystem, path.partition("/")[0], [one["path"] for one in listed])
    if not access_behind(filesystem).has_folders:
        return
    if filesystem.get_file_info(path).type == fs.FileType.Directory:
        with suppress(OSError):
            filesystem.delete_dir(path)


def _delete(filesystem: fs.FileSystem, bucket: str, keys: list[str]) -> None:
    """Delete objects; one by one if the batch request fails.

    S3 ignores missing objects. Other stores reject a batch that names one.
    """
    try:
        obstore.delete(store_behind(filesystem), keys)
    except FileNotFoundError as error:
        if find_store_fault(error) is not None:
            raise
        for key in keys if len(keys) > 1 else ():
            _delete(filesystem, bucket, [key])
    except GenericError:
        if not access_behind(filesystem).may_reject_batches:
            raise
        for info in filesystem.get_file_info([f"{bucket}/{key}" for key in keys]):
            if info.is_file:
                filesystem.delete_file(info.path)


def _forget(known: _Known) -> None:
    _marks.pop(known, None)
    _commits.pop(known, None)


def _of(filesystem: fs.FileSystem, path: str) -> tuple[ObjectStore, str]:
    with _store_errors(path):
        return store_behind(filesystem), path.partition("/")[2]


@contextmanager
def _store_errors(path: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        if find_store_fault(error) is None:
            raise FileNotFoundError(f"{path} is not there") from None
        raise _unread(path, error) from None
    except BaseError as error:
        raise _unread(path, error) from None


def _unread(path: str, error: Exception) -> OSError:
    """Return an OSError with the known facts only: the store's answer may contain a token."""
    return OSError(f"{path}: {type(error).__name__} {parsable_parts(error)}")
