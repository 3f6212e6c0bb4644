"""Files of a lake that are read in parts: of an object store each part is a request, and takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.stores.object_store import is_store

_WHOLE_BYTES = 1 << 20
"""What is not larger is read by one request: its bytes take less time than a second one."""
_HELD_BYTES = 32 << 20
_REQUESTS = 16
"""At once: who waits for a store needs no core."""


def open_file(filesystem: fs.FileSystem, path: str, size: int) -> pa.NativeFile:
    """A file of at most so many bytes, to be read from anywhere. Raises FileNotFoundError, OSError."""
    if is_store(filesystem) and size <= _WHOLE_BYTES:
        return pa.BufferReader(objects.read(filesystem, path))
    if isinstance(filesystem, fs.AzureFileSystem):
        return objects.open_reader(filesystem, path)
    return filesystem.open_input_file(path)


class HeldFiles:
    """Files of a store that are looked at several times stay open, since to open one is a request, or all of
    it; up to so many bytes of those that are here whole. By their paths: a file never changes. Any thread may
    ask."""

    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem
        self._files: dict[str, pa.NativeFile] = {}
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        """Whether one of this size would stay open."""
        return size > _WHOLE_BYTES or self._bytes + size <= _HELD_BYTES

    def open(self, path: str, size: int) -> AbstractContextManager[pa.NativeFile]:
        """As `open_file`. Not to be closed but by leaving it."""
        if path in self._files:
            return nullcontext(self._files[path])
        file = open_file(self._filesystem, path, size)
        if not is_store(self._filesystem) or not self.has_room(size):
            return closing(file)
        self._bytes += size if isinstance(file, pa.BufferReader) else 0
        self._files[path] = file
        return nullcontext(file)


@contextmanager
def open_parquet(
    filesystem: fs.FileSystem,
    source: pa.NativeFile,
    metadata: pq.FileMetaData | None = None,
    *,
    in_batches: bool = False,
) -> Iterator[pq.ParquetFile]:
    """An open file as Parquet, which stays open. `in_batches`: all of it will be read so, and need not be in
    memory at once."""
    # Spark writes moments as it always has; in nanoseconds they would not all fit. Columns beside each other
    # are one request, if they may be in memory together.
    with pq.ParquetFile(
        source,
        metadata=metadata,
        coerce_int96_timestamp_unit="us",
        pre_buffer=is_store(filesystem) and not in_batches,
    ) as parquet:
        yield parquet


def read_range(filesystem: fs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Some bytes of a file, or fewer where it ends. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        return objects.read_range(filesystem, path, offset, length)
    with filesystem.open_input_file(path) as file:
        return bytes(file.read_at(length, offset))


@contextmanager
def many_at_once(files: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` for work on files, with a thread a core, if there is more than one file."""
    with _threads(files, max(1, pa.cpu_count())) as each:
        yield each


@contextmanager
def requests_at_once(filesystem: fs.FileSystem, count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` that waits for a store's answers beside each other; on a disk one after the other."""
    with _threads(count, _REQUESTS if is_store(filesystem) else 1) as each:
        yield each


@contextmanager
def _threads(count: int, most: int) -> Iterator[Callable[..., Iterator[Any]]]:
    if min(count, most) < 2:
        yield map
        return
    with ThreadPoolExecutor(min(count, most)) as pool:
        yield pool.map
