"""Where lake files are written: one native Arrow filesystem for local paths and object stores alike.

Files of a lake that are written: a small one of a store is in memory until it is whole, and then one put.
Arrow's own stream puts in two exchanges (it waits for `100 Continue`), and a server that closes the
connection in between costs it up to a second before it tries again.
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
from airflow_provider_pgrepl.replication.settings.lake import EXAMPLES, SCHEMES, place_in_store
from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.durable import LOG_FOLDER, local_path
from airflow_provider_pgrepl.replication.storage.stores import access_to, is_store, open_filesystem

_LOCAL = fs.LocalFileSystem()
_COMMIT = re.compile(r"(\d{20})\.json")
_WHOLE_BYTES = 1 << 20
"""What is not larger is read by one request: its bytes take less time than a second one."""
_HELD_BYTES = 32 << 20
_REQUESTS = 16
"""At once: who waits for a store needs no core."""
_IN_MEMORY_BYTES = 4 << 20


def open_storage(root: str) -> tuple[fs.FileSystem, str]:
    """The filesystem of a lake, or of a place below one, and the path in it. Raises LakeError."""
    local = local_path(root)
    if local is not None:
        return _LOCAL, str(local)
    place = place_in_store(root)
    if place is None or place.scheme not in SCHEMES:
        raise LakeError(f"the lake {root} cannot be opened", f"give {EXAMPLES}")
    return open_filesystem(access_to(place)), f"{place.bucket}/{place.key}"


def log_path(root: str) -> str:
    """The folder of a Delta table's log. `root`: the table's path in its filesystem."""
    return f"{root}/{LOG_FOLDER}"


def commit_path(root: str, version: int) -> str:
    """The file of one commit of a Delta table. `root`: the table's path in its filesystem."""
    return f"{log_path(root)}/{version:020d}.json"


def commit_version(name: str) -> int | None:
    """Return the version of the commit that a file of this name in a log is; None for other files."""
    match = _COMMIT.fullmatch(name)
    return int(match[1]) if match else None


def has_commit(uri: str, version: int) -> bool:
    """Whether the file of a commit is there, whatever it holds. Raises OSError."""
    filesystem, root = open_storage(uri)
    path = commit_path(root, version)
    if is_store(filesystem):
        return objects.look_at(filesystem, path) is not None
    return bool(filesystem.get_file_info(path).type == fs.FileType.File)


def commit_mark(uri: str, version: int) -> str:
    """What tells the file of a commit from another in its place; empty when there is none, or nothing in it.
    Raises OSError."""
    filesystem, root = open_storage(uri)
    path = commit_path(root, version)
    if is_store(filesystem):
        return objects.mark_of(filesystem, path)
    found = filesystem.get_file_info(path)
    return f"{found.size}@{found.mtime_ns}" if found.size else ""


def read_commit(uri: str, version: int) -> bytes | None:
    """The file of a commit of a table; None when it is not there. Raises OSError."""
    filesystem, root = open_storage(uri)
    try:
        return _read_commit(filesystem, commit_path(root, version))
    except FileNotFoundError:
        return None


def read_commit_actions(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    """What a commit says. `root`: the table's path in its filesystem.

    Raises FileNotFoundError when its file is gone, OSError, ValueError when it is not whole.
    """
    content = _read_commit(filesystem, commit_path(root, version))
    return [json.loads(line) for line in content.splitlines() if line]


def _read_commit(filesystem: fs.FileSystem, path: str) -> bytes:
    return objects.read_commit(filesystem, path) if is_store(filesystem) else read_file(filesystem, path)


def read_file(filesystem: fs.FileSystem, path: str) -> bytes:
    """All of a file. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        return objects.read(filesystem, path)
    with filesystem.open_input_stream(path) as source:
        return bytes(source.read())


def delete_files(filesystem: fs.FileSystem, paths: Iterable[str]) -> None:
    """Those that are there. Raises OSError."""
    if is_store(filesystem):
        objects.delete(filesystem, paths)
        return
    for path in paths:
        with suppress(FileNotFoundError):
            filesystem.delete_file(path)


def delete_tree(filesystem: fs.FileSystem, folder: str) -> None:
    """A folder with all that is in it. Raises OSError."""
    if is_store(filesystem):
        # Arrow would put a marker in the place of the folder above, where we may have no rights.
        objects.delete_below(filesystem, folder)
    else:
        filesystem.delete_dir(folder)


def make_folders(filesystem: fs.FileSystem, path: str) -> None:
    """Have a folder that files can be written into: a store has none. Raises OSError."""
    if not is_store(filesystem):
        filesystem.create_dir(path, recursive=True)


def read_parquet(filesystem: fs.FileSystem, path: str, columns: Sequence[str] | None = None) -> pa.Table:
    """One Parquet file; a folder in its path that looks like a partition's adds no column. Raises
    FileNotFoundError, OSError."""
    return pq.read_table(path, columns=columns, filesystem=filesystem, partitioning=None)


def parse_parquet(content: bytes) -> pa.Table:
    """A Parquet file of which all was read: no fault of the storage. Raises ValueError if it is damaged."""
    try:
        return pq.read_table(pa.BufferReader(content))
    except (pa.ArrowException, OSError, ValueError):
        raise ValueError("a Parquet file is damaged") from None


def make_folder(uri: str) -> None:
    """Have the folder of a table that is to be made: deltalake takes one that it cannot make for one that is
    not there. Raises OSError."""
    local = local_path(uri)
    if local is not None:
        local.mkdir(parents=True, exist_ok=True)


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


class Output:
    """A file that is being written through `stream`; a context manager. It is there once it is closed."""

    def __init__(self, filesystem: fs.FileSystem, path: str, size: int) -> None:
        """`size`: about how many bytes it will have at most. Raises OSError, as all else here."""
        self._filesystem, self._path = filesystem, path
        self._is_put = is_store(filesystem) and size <= _IN_MEMORY_BYTES
        self.stream: pa.NativeFile = (
            pa.BufferOutputStream() if self._is_put else filesystem.open_output_stream(path)
        )

    def tell(self) -> int:
        """The bytes so far."""
        return int(self.stream.tell())

    def close(self) -> None:
        """Have it there, whole."""
        if self.stream.closed:
            return
        if self._is_put:
            objects.put(self._filesystem, self._path, self.stream.getvalue().to_pybytes())
        else:
            self.stream.close()

    def drop(self) -> None:
        """Close it, as it is not wanted any more: what there is of it, if anything, is to be deleted."""
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
