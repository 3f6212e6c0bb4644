"""Objects of a store, a request each: Arrow's filesystem asks more, and for folders, too.

`filesystem` is the store's as Arrow has it, which `open_storage` gives; `path` is always bucket and key.
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

from airflow_provider_pgrepl.replication.storage.errors import facts_in, fault_of
from airflow_provider_pgrepl.replication.storage.stores import store_behind

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

_MARK_S, _MARKS = 1.0, 4096
_Known = tuple[int, str]
"""Which filesystem, and the path in it."""
_marks: dict[_Known, tuple[str, float]] = {}
_COMMITS, _COMMIT_BYTES = 64, 64 << 10
_commits: dict[_Known, tuple[bytes, float]] = {}
"""What this process has put or read, for a second: a merge looks at a commit from several places."""


def read_commit(filesystem: fs.FileSystem, path: str) -> bytes:
    """The object of a commit, remembered for a second. Raises FileNotFoundError, OSError."""
    content, until = _commits.get((id(filesystem), path), (b"", 0.0))
    if time.monotonic() >= until:
        content = read(filesystem, path)
        _keep((id(filesystem), path), content)
    return content


def read(filesystem: fs.FileSystem, path: str) -> bytes:
    """An object. Raises FileNotFoundError, OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        return bytes(obstore.get(store, key).bytes())


def open_reader(filesystem: fs.FileSystem, path: str) -> pa.NativeFile:
    """An object to be read in parts. Raises FileNotFoundError, OSError.

    Arrow's own of Azure ends the process where a token cannot be had: its client throws, and nobody catches.
    """
    found = look_at(filesystem, path)
    if found is None:
        raise FileNotFoundError(f"{path} is not there")
    return pa.PythonFile(_Reader(filesystem, path, found["size"]), mode="r")


class _Reader(io.RawIOBase):
    """A range of an object for each read."""

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
    """Some bytes of an object, or fewer where it ends. Raises FileNotFoundError, OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        return bytes(obstore.get_range(store, key, start=offset, length=length))


def look_at(filesystem: fs.FileSystem, path: str) -> ObjectMeta | None:
    """What the store says of an object; None when there is none. Raises OSError."""
    store, key = _of(filesystem, path)
    try:
        with _store_errors(path):
            return obstore.head(store, key)
    except FileNotFoundError:
        return None


def mark_of(filesystem: fs.FileSystem, path: str) -> str:
    """What tells an object from another in its place; empty when there is none, or nothing in it.

    It is remembered for a second: one merge asks for it often. Raises OSError.
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
    """Put a commit, unless there is one. What was put need not be asked for at once.

    Raises AlreadyExistsError, and what else of BaseError the store's client does; OSError when it cannot be
    opened.
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
    """An object, whatever was there before. Raises OSError."""
    store, key = _of(filesystem, path)
    with _store_errors(path):
        obstore.put(store, key, content)


def delete(filesystem: fs.FileSystem, paths: Iterable[str]) -> None:
    """Objects of one bucket, many a request; those that are gone are none the less. Raises OSError."""
    paths = list(paths)
    for path in paths:
        _forget((id(filesystem), path))
    keys = [_of(filesystem, path)[1] for path in paths]
    if keys:
        with _store_errors(paths[0]):
            _delete(filesystem, paths[0].partition("/")[0], keys)


def delete_below(filesystem: fs.FileSystem, path: str) -> None:
    """All objects in what stands for a folder. Raises OSError."""
    _marks.clear()
    _commits.clear()
    store, key = _of(filesystem, path)
    with _store_errors(path):
        for listed in obstore.list(store, f"{key.strip('/')}/", chunk_size=1000):
            _delete(filesystem, path.partition("/")[0], [one["path"] for one in listed])
    # Where Azure's account has folders, those are left, empty, and hurt nobody. Elsewhere nothing is left.
    is_azure = isinstance(filesystem, fs.AzureFileSystem)
    if is_azure and filesystem.get_file_info(path).type == fs.FileType.Directory:
        with suppress(OSError):
            filesystem.delete_dir(path)


def _delete(filesystem: fs.FileSystem, bucket: str, keys: list[str]) -> None:
    """S3 says nothing of those that are gone, others refuse: then one after the other."""
    try:
        obstore.delete(store_behind(filesystem), keys)
    except FileNotFoundError as error:
        if fault_of(error) is not None:
            raise
        for key in keys if len(keys) > 1 else ():
            _delete(filesystem, bucket, [key])
    except GenericError:
        # A batch takes another right of a token of Azure's than its parts do, and not every token has it.
        if not isinstance(filesystem, fs.AzureFileSystem):
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
        if fault_of(error) is None:
            raise FileNotFoundError(f"{path} is not there") from None
        raise _unread(path, error) from None
    except BaseError as error:
        raise _unread(path, error) from None


def _unread(path: str, error: Exception) -> OSError:
    """With what is known of the store's refusal and no more: what it answers may tell a token."""
    return OSError(f"{path}: {type(error).__name__} {facts_in(error)}")
