"""Objects of a store that speaks S3, a request each: Arrow's filesystem asks more, and for folders, too.

`path` is always bucket and key, as Arrow has them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from airflow_provider_pgrepl.replication.storage.object_store import open_store
from airflow_provider_pgrepl.replication.storage.store_faults import code_in, fault_of

if TYPE_CHECKING:
    from obstore import ObjectMeta

_MARK_S, _MARKS = 1.0, 4096
_marks: dict[str, tuple[str, float]] = {}
_COMMITS, _COMMIT_BYTES = 64, 64 << 10
_commits: dict[str, tuple[bytes, float]] = {}
"""What this process has put or read, for a second: a merge looks at a commit from several places."""


def read_commit(path: str) -> bytes:
    """The object of a commit, remembered for a second. Raises FileNotFoundError, OSError."""
    content, until = _commits.get(path, (b"", 0.0))
    if time.monotonic() >= until:
        content = read(path)
        _keep(path, content)
    return content


def read(path: str) -> bytes:
    """An object. Raises FileNotFoundError, OSError."""
    store, key = _of(path)
    with _store_errors(path):
        return bytes(obstore.get(store, key).bytes())


def read_range(path: str, offset: int, length: int) -> bytes:
    """Some bytes of an object, or fewer where it ends. Raises FileNotFoundError, OSError."""
    store, key = _of(path)
    with _store_errors(path):
        return bytes(obstore.get_range(store, key, start=offset, length=length))


def look_at(path: str) -> ObjectMeta | None:
    """What the store says of an object; None when there is none. Raises OSError."""
    store, key = _of(path)
    try:
        with _store_errors(path):
            return obstore.head(store, key)
    except FileNotFoundError:
        return None


def mark_of(path: str) -> str:
    """What tells an object from another in its place; empty when there is none, or nothing in it.

    It is remembered for a second: one merge asks for it often. Raises OSError.
    """
    mark, until = _marks.get(path, ("", 0.0))
    if time.monotonic() < until:
        return mark
    found = look_at(path)
    if found is None or not found["size"]:
        _forget(path)
        return ""
    return _remember(path, found["size"], found["e_tag"])


def has_put(path: str, content: bytes, e_tag: str | None) -> None:
    """That this process has just put a commit, and nobody else before: it need not be asked for at once."""
    _remember(path, len(content), e_tag)
    _keep(path, content)


def _keep(path: str, content: bytes) -> None:
    if len(content) <= _COMMIT_BYTES:
        if len(_commits) >= _COMMITS:
            _commits.clear()
        _commits[path] = content, time.monotonic() + _MARK_S


def _remember(path: str, size: int, e_tag: str | None) -> str:
    if len(_marks) >= _MARKS:
        _marks.clear()
    mark = f"{size}@{e_tag}"
    _marks[path] = mark, time.monotonic() + _MARK_S
    return mark


def put(path: str, content: bytes) -> None:
    """An object, whatever was there before. Raises OSError."""
    store, key = _of(path)
    with _store_errors(path):
        obstore.put(store, key, content)


def delete(paths: Iterable[str]) -> None:
    """Objects of one bucket, a thousand a request; those that are gone are none the less. Raises OSError."""
    paths = list(paths)
    for path in paths:
        _forget(path)
    keys = [_of(path) for path in paths]
    if keys:
        with _store_errors(keys[0][1]):
            obstore.delete(keys[0][0], [key for _, key in keys])


def delete_below(path: str) -> None:
    """All objects in what stands for a folder. Raises OSError."""
    _marks.clear()
    _commits.clear()
    store, key = _of(path)
    with _store_errors(path):
        for listed in obstore.list(store, f"{key.strip('/')}/", chunk_size=1000):
            obstore.delete(store, [one["path"] for one in listed])


def _forget(path: str) -> None:
    _marks.pop(path, None)
    _commits.pop(path, None)


def _of(path: str) -> tuple[S3Store, str]:
    bucket, _, key = path.partition("/")
    return open_store(bucket), key


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
    """With the store's code and no more: what it answers may tell a token."""
    return OSError(f"{path}: {type(error).__name__} <Code>{code_in(error)}</Code>")
