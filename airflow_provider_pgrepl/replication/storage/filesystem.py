"""Where lake files are written: one native Arrow filesystem for local paths and object stores alike."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.settings.lake import EXAMPLES, SCHEMES, place_in_store
from airflow_provider_pgrepl.replication.storage import objects
from airflow_provider_pgrepl.replication.storage.durable import LOG_FOLDER, local_path
from airflow_provider_pgrepl.replication.storage.stores.object_store import (
    access_to,
    is_store,
    open_filesystem,
)

_LOCAL = fs.LocalFileSystem()
_COMMIT = re.compile(r"(\d{20})\.json")


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
