"""File access for lakes, through native Arrow filesystems for local paths and object stores.

A small file for a store is buffered in memory and written by one put request. Arrow's own stream needs two
round trips (it waits for `100 Continue`). If the server closes the connection in between, Arrow retries only
after up to 1 s.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.settings.lake import EXAMPLES, store_location
from airflow_provider_pgrepl.replication.settings.stores import STORES

from . import objects
from .durable import LOG_FOLDER, local_path
from .stores import access_behind, access_to, is_store, open_filesystem

_LOCAL = fs.LocalFileSystem()
_COMMIT = re.compile(r"(\d{20})\.json")
_WHOLE_BYTES = 1 << 20
"""Files up to this size are read by one request: transferring them takes less time than a second request."""
_HELD_BYTES = 32 << 20
_REQUESTS = 16
"""Concurrent requests to a store; more than the number of cores, because a waiting thread needs no core."""
_IN_MEMORY_BYTES = 4 << 20


def open_storage(root: str) -> tuple[fs.FileSystem, str]:
    """Return the filesystem of a lake, or of a location below it, and the path in it.

    Raises LakeError if the URI's scheme is not supported, OSError.
    """
    local = local_path(root)
    if local is not None:
        return _LOCAL, str(local)
    place = store_location(root)
    if place is None or place.scheme not in STORES:
        raise LakeError(f"the lake {root} cannot be opened", f"give {EXAMPLES}")
    return open_filesystem(access_to(place)), f"{place.bucket}/{place.key}"


def log_path(root: str) -> str:
    """Return the folder of a Delta table's log. `root`: the table's path in its filesystem."""
    return f"{root}/{LOG_FOLDER}"


def commit_path(root: str, version: int) -> str:
    """Return the path of a commit of a Delta table. `root`: the table's path in its filesystem."""
    return f"{log_path(root)}/{version:020d}.json"


def commit_version(name: str) -> int | None:
    """Return the version of a commit file by its name, or None for another file."""
    match = _COMMIT.fullmatch(name)
    return int(match[1]) if match else None


def has_commit(uri: str, version: int) -> bool:
    """Return True if the file of a commit exists; its content is not checked. Raises OSError."""
    filesystem, root = open_storage(uri)
    path = commit_path(root, version)
    if is_store(filesystem):
        return objects.look_at(filesystem, path) is not None
    return bool(filesystem.get_file_info(path).type == fs.FileType.File)


def commit_mark(uri: str, version: int) -> str:
    """Return a mark of a commit's file: its size with its ETag or modification time.

    Another file at the same path has another mark. Returns "" if the file is missing or empty. Raises
    OSError.
    """
    filesystem, root = open_storage(uri)
    path = commit_path(root, version)
    if is_store(filesystem):
        return objects.mark_of(filesystem, path)
    found = filesystem.get_file_info(path)
    return f"{found.size}@{found.mtime_ns}" if found.size else ""


def read_commit(uri: str, version: int) -> bytes | None:
    """Return the content of a commit's file, or None if it does not exist. Raises OSError."""
    filesystem, root = open_storage(uri)
    try:
        return _read_commit(filesystem, commit_path(root, version))
    except FileNotFoundError:
        return None


def read_commit_actions(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    """Return a commit's actions. `root`: the table's path in its filesystem.

    Raises FileNotFoundError if its file does not exist, ValueError if it is incomplete, OSError.
    """
    content = _read_commit(filesystem, commit_path(root, version))
    return [json.loads(line) for line in content.splitlines() if line]


def _read_commit(filesystem: fs.FileSystem, path: str) -> bytes:
    return objects.read_commit(filesystem, path) if is_store(filesystem) else read_file(filesystem, path)


def read_file(filesystem: fs.FileSystem, path: str) -> bytes:
    """Read a whole file. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        return objects.read(filesystem, path)
    with filesystem.open_input_stream(path) as source:
        return bytes(source.read())


def delete_files(filesystem: fs.FileSystem, paths: Iterable[str]) -> None:
    """Delete files. Missing files are not an error. Raises OSError."""
    if is_store(filesystem):
        objects.delete(filesystem, paths)
        return
    for path in paths:
        with suppress(FileNotFoundError):
            filesystem.delete_file(path)


def delete_tree(filesystem: fs.FileSystem, folder: str) -> None:
    """Delete a folder and its contents. Raises OSError."""
    if is_store(filesystem):
        # Arrow would create a marker object for the parent folder, for which permission may be missing.
        objects.delete_below(filesystem, folder)
    else:
        filesystem.delete_dir(folder)


def make_folders(filesystem: fs.FileSystem, path: str) -> None:
    """Create a folder and its parents; does nothing for a store, which has no folders. Raises OSError."""
    if not is_store(filesystem):
        filesystem.create_dir(path, recursive=True)


def read_parquet(filesystem: fs.FileSystem, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """Read one Parquet file. A folder in its path that looks like a partition adds no column.

    Raises FileNotFoundError, OSError.
    """
    return pq.read_table(path, columns=columns, filesystem=filesystem, partitioning=None)


def parse_parquet(content: bytes) -> pa.Table:
    """Parse the content of a Parquet file. Raises ValueError if it is damaged, never a storage error."""
    try:
        return pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError):
        raise ValueError("a Parquet file is damaged") from None


def make_folder(uri: str) -> None:
    """Create the folder of a new table; does nothing for a store. Raises OSError.

    deltalake reports a folder that it cannot create as one that does not exist.
    """
    local = local_path(uri)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)


def open_file(filesystem: fs.FileSystem, path: str, size: int) -> pa.NativeFile:
    """Open a file of at most `size` bytes for random access. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        if size <= _WHOLE_BYTES:
            return pa.BufferReader(objects.read(filesystem, path))
        if access_behind(filesystem).opens_by_requests:
            return objects.open_reader(filesystem, path)
    return filesystem.open_input_file(path)


class OpenFileCache:
    """A cache of open files of a store, by path: opening a file costs a request, or reads it completely.

    Files that are held in memory are limited to `_HELD_BYTES` bytes together. A file never changes. Threads
    may share it without a lock.
    """

    def __init__(self, filesystem: fs.FileSystem) -> None:
        self._filesystem = filesystem
        self._files: dict[str, pa.NativeFile] = {}
        self._bytes = 0

    def has_room(self, size: int) -> bool:
        """Return True if a file of this size would stay open."""
        return size > _WHOLE_BYTES or self._bytes + size <= _HELD_BYTES

    def open(self, path: str, size: int) -> AbstractContextManager[pa.NativeFile]:
        """Open a file as `open_file` does, for use as a context manager. Do not close the file otherwise."""
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
    """Yield an open file as a ParquetFile. The file stays open afterwards.

    `in_batches`: True if it will be read in batches, so that a store's file is not buffered as a whole.
    """
    # Spark writes timestamps as INT96. Not all of them fit into nanoseconds. With `pre_buffer`, adjacent
    # columns are read by one request, and held in memory together.
    with pq.ParquetFile(
        source,
        metadata=metadata,
        coerce_int96_timestamp_unit="us",
        pre_buffer=is_store(filesystem) and not in_batches,
    ) as parquet:
        yield parquet


def read_range(filesystem: fs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Read `length` bytes of a file, or fewer at its end. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        return objects.read_range(filesystem, path, offset, length)
    with filesystem.open_input_file(path) as file:
        return bytes(file.read_at(length, offset))


@contextmanager
def many_at_once(files: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` for work on files, with one thread for each core if there is more than one file."""
    with _threads(files, max(1, pa.cpu_count())) as each:
        yield each


@contextmanager
def requests_at_once(filesystem: fs.FileSystem, count: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """Yield a `map` that sends requests to a store concurrently; for a file system it is sequential."""
    with _threads(count, _REQUESTS if is_store(filesystem) else 1) as each:
        yield each


@contextmanager
def _threads(count: int, most: int) -> Iterator[Callable[..., Iterator[Any]]]:
    if min(count, most) < 2:
        yield map
        return
    with ThreadPoolExecutor(min(count, most)) as pool:
        yield pool.map


class Output:
    """A file that is written through `stream`; a context manager. The file is complete after `close`."""

    def __init__(self, filesystem: fs.FileSystem, path: str, size: int) -> None:
        """Open the file for writing. `size`: its estimated maximum size in bytes.

        Raises OSError, as do all methods.
        """
        self._filesystem, self._path = filesystem, path
        self._is_put = is_store(filesystem) and size <= _IN_MEMORY_BYTES
        self.stream: pa.NativeFile = (
            pa.BufferOutputStream() if self._is_put else filesystem.open_output_stream(path)
        )

    def tell(self) -> int:
        """Return the number of bytes written so far."""
        return int(self.stream.tell())

    def close(self) -> None:
        """Finish the file; a buffered one is put into the store. Does nothing if it is closed."""
        if self.stream.closed:
            return
        if self._is_put:
            objects.put(self._filesystem, self._path, self.stream.getvalue().to_pybytes())
        else:
            self.stream.close()

    def drop(self) -> None:
        """Close the stream of an unwanted file. The caller deletes a file that may exist."""
        if not self.stream.closed:
            self.stream.close()

    def __enter__(self) -> Output:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.drop()
