"""Files of a lake that are read in parts: of an object store each part is a request, and takes its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.filesystem import is_store

_WHOLE_BYTES = 1 << 20
"""What is not larger is read by one request: its bytes take less time than a second one."""
_REQUESTS = 16
"""At once: who waits for a store needs no core."""


def open_file(filesystem: fs.FileSystem, path: str, size: int) -> pa.NativeFile:
    """A file of at most so many bytes, to be read from anywhere. Raises FileNotFoundError, OSError."""
    if is_store(filesystem) and size <= _WHOLE_BYTES:
        return pa.BufferReader(objects.read(path))
    return filesystem.open_input_file(path)


@contextmanager
def open_parquet(
    filesystem: fs.FileSystem,
    source: pa.NativeFile,
    metadata: pq.FileMetaData | None = None,
    *,
    in_batches: bool = False,
) -> Iterator[pq.ParquetFile]:
    """An open file as Parquet. `in_batches`: all of it will be read so, and need not be in memory at once."""
    # Spark writes moments as it always has; in nanoseconds they would not all fit. Columns beside each other
    # are one request, if they may be in memory together.
    with (
        source,
        pq.ParquetFile(
            source,
            metadata=metadata,
            coerce_int96_timestamp_unit="us",
            pre_buffer=is_store(filesystem) and not in_batches,
        ) as parquet,
    ):
        yield parquet


def read_range(filesystem: fs.FileSystem, path: str, offset: int, length: int) -> bytes:
    """Some bytes of a file, or fewer where it ends. Raises FileNotFoundError, OSError."""
    if is_store(filesystem):
        return objects.read_range(path, offset, length)
    with filesystem.open_input_file(path) as file:
        return bytes(file.read_at(length, offset))


@contextmanager
def many_at_once(filesystem: fs.FileSystem, files: int) -> Iterator[Callable[..., Iterator[Any]]]:
    """A `map` with threads, if there is more than one file."""
    if files < 2:
        yield map
        return
    threads = min(files, _REQUESTS) if is_store(filesystem) else max(1, pa.cpu_count())
    with ThreadPoolExecutor(threads) as pool:
        yield pool.map
