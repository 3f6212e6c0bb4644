"""Dropping of lake tables: deletes what the pipeline wrote, with all versions and the histories."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake.exceptions import DeltaError
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri, system_folder
from airflow_provider_pgrepl.replication.delta.log import checkpoint_version, read_checkpoint
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version, live_files
from airflow_provider_pgrepl.replication.lake.delta.ownership import (
    ADOPTED_APP,
    NOT_MARKED,
    Owner,
    is_link,
    is_written_name,
    read_ownership,
    table_files,
)
from airflow_provider_pgrepl.replication.lake.delta.snapshot_commit import read_writers
from airflow_provider_pgrepl.replication.lake.history.table import history_path
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import (
    commit_version,
    delete_files,
    delete_tree,
    is_storage_error,
    is_store,
    log_path,
    open_storage,
    read_commit_actions,
    storage_error,
    storage_errors,
)

_VERSION = re.compile(r"\.?(\d{20})\..+")


def check_droppable(
    lake_root: str, tables: Iterable[TableName], pipeline: str, copied: Collection[TableName] | None = None
) -> None:
    """Raise LakeError, naming each folder that is not proven to hold only this pipeline's data.

    `copied`: the tables that the state or a consistent point records as copied (None: all). Tables that an
    earlier version created have no marks, so they need this record.

    Raises LakeUnavailableError if the storage does not answer: nothing is known then.
    """
    kept = []
    for table in tables:
        for path in (table.path, history_path(table)):
            is_known = copied is None or table in copied
            reason = _reason_to_keep(f"{lake_root}/{path}", pipeline, is_known=is_known)
            if reason is not None:
                kept.append(f"{lake_root}/{path} ({reason})")
    if kept:
        raise LakeError(
            f"nothing was dropped, because pipeline {pipeline} has not written all of it: {'; '.join(kept)}",
            "move each of these folders away, then run the command again",
        )


def _reason_to_keep(uri: str, pipeline: str, *, is_known: bool) -> str | None:
    """Return why a folder must not be dropped; None if everything that would be deleted is the pipeline's."""
    found = read_ownership(uri, pipeline)
    if found.owner is Owner.NOBODY:
        return None
    if found.owner is not Owner.PIPELINE:
        return found.reason
    if not (found.is_marked or is_known):
        return NOT_MARKED
    try:
        table = open_delta(uri)
    except (DeltaError, OSError) as error:
        if is_storage_error(error):
            raise storage_error(f"{uri} is not dropped, since it cannot be read", error) from None
        return f"the table cannot be opened ({type(error).__name__}), so who wrote it last is not known"
    writers = read_writers(uri, int(table.version()))
    if writers.foreign:
        newest = writers.foreign[0]
        return f"version {newest.version} was written by another program ({newest.operation})"
    if writers.is_complete:
        return None
    # Maintenance keeps log entries of commits by other programs. Its earlier versions, and other programs,
    # did not, so look for files that only another program can have written.
    # Files of others that were adopted are the pipeline's.
    others = sorted(path for path in live_files(table) if not is_written_name(path))
    if not others or app_version(table, ADOPTED_APP):
        return None
    return (
        f"its log does not reach back to the last snapshot, and another program may have written {others[0]}"
    )


def present_tables(lake_root: str, tables: Iterable[TableName]) -> list[TableName]:
    """Return the tables whose folder, or whose history's folder, exists in the lake, sorted by name."""
    filesystem, root = open_storage(lake_root)
    with storage_errors(lake_root, "read"):
        return [
            table
            for table in sorted(tables)
            if any(_is_folder(filesystem, f"{root}/{path}") for path in (table.path, history_path(table)))
        ]


def foreign_files(lake_root: str, tables: Iterable[TableName]) -> list[str]:
    """Return the files and links in the tables' folders that `drop_lake_tables` does not delete."""
    filesystem, root = open_storage(lake_root)
    found = []
    for table in tables:
        for path in (history_path(table), table.path):
            with storage_errors(f"{lake_root}/{path}"):
                if _is_folder(filesystem, f"{root}/{path}"):
                    own = set(_own_files(filesystem, f"{root}/{path}"))
                    others = set(table_files(filesystem, f"{root}/{path}")) - own
                    found += [f"{lake_root}/{path}/{name}" for name in sorted(others)]
    return found


def drop_lake_tables(lake_root: str, tables: Iterable[TableName]) -> list[TableName]:
    """Delete these tables and their histories, and return the tables that existed. Can be repeated.

    Call `check_droppable` immediately before. No process may be writing the tables. Does not delete files of
    other programs, or folders that are symbolic links. Raises LakeError, LakeUnavailableError.
    """
    filesystem, root = open_storage(lake_root)
    dropped = []
    for table in tables:
        found = [_drop_table(lake_root, path) for path in (history_path(table), table.path)]
        if any(found):
            dropped.append(table)
        _delete_if_empty(filesystem, f"{root}/{table.path.partition('/')[0]}")
    return dropped


def drop_system_folder(lake_root: str) -> None:
    """Delete the lake's system folder, the changelog in it last, and then the lake root if it is empty.

    Call this only after reading in the changelog that the lake is this pipeline's. The changelog is deleted
    last, so that it still shows this if the deletion is interrupted and repeated. Raises LakeError, also if
    the folder is a symbolic link; LakeUnavailableError.
    """
    filesystem, root = open_storage(lake_root)
    folder, changelog = (open_storage(uri(lake_root))[1] for uri in (system_folder, changelog_uri))
    if is_link(system_folder(lake_root)):
        raise LakeError(f"{system_folder(lake_root)} is a symbolic link, and was not dropped", "remove it")
    with storage_errors(folder):
        for info in filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True)):
            if info.path == changelog:
                continue
            if info.type == fs.FileType.Directory and not Path(info.path).is_symlink():
                delete_tree(filesystem, info.path)
            else:
                delete_files(filesystem, [info.path])
        _delete_with_log_last(filesystem, changelog, list(table_files(filesystem, changelog)))
        if is_store(filesystem) or _is_folder(filesystem, folder):
            delete_tree(filesystem, folder)
    _delete_if_empty(filesystem, root)


def _drop_table(lake_root: str, path: str) -> bool:
    filesystem, root = open_storage(f"{lake_root}/{path}")
    if is_link(f"{lake_root}/{path}"):
        return False
    with storage_errors(root):
        if not _is_folder(filesystem, root):
            return False
        own = list(_own_files(filesystem, root))
        _delete_with_log_last(filesystem, root, own)
        if is_store(filesystem) and next(table_files(filesystem, root), None) is None:
            delete_tree(filesystem, root)  # Azure may have folders, which remain without their files.
    return True


def _delete_with_log_last(filesystem: fs.FileSystem, root: str, files: Iterable[str]) -> None:
    """Delete data files, and then the log from the newest version to the oldest.

    If this is interrupted, the rest of the table can still be opened and shows its owner.
    """
    names = list(files)
    delete_files(filesystem, [f"{root}/{name}" for name in names])
    entries = filesystem.get_file_info(fs.FileSelector(log_path(root), recursive=True, allow_not_found=True))
    logged = sorted((info.path for info in entries if info.type == fs.FileType.File), key=_log_order)
    oldest = [path for path in logged if _log_order(path)[:2] == _log_order(logged[-1])[:2]]
    delete_files(filesystem, logged[: len(logged) - len(oldest)])
    delete_files(filesystem, oldest)
    if not is_store(filesystem):
        _remove_empty_folders(Path(root))


def _log_order(path: str) -> tuple[int, int, int]:
    """Return the key that sorts files of the log for deletion.

    Files without a version come first. Versions follow, newest first, the commit of a version before its
    checkpoint.
    """
    name = path.rpartition("/")[2]
    match = _VERSION.fullmatch(name)
    if match is None or name.startswith("."):
        return 0, 0, 0
    return 1, -int(match[1]), int(checkpoint_version(name) is not None)


def _own_files(filesystem: fs.FileSystem, root: str) -> Iterator[str]:
    """Yield the files in a table's folder that its log names, or whose names only this package gives.

    Symbolic links are left out.
    """
    logged = _logged_files(filesystem, root)
    for name in table_files(filesystem, root):
        if (name in logged or is_written_name(name)) and (
            is_store(filesystem) or not Path(root, name).is_symlink()
        ):
            yield name


def _logged_files(filesystem: fs.FileSystem, root: str) -> set[str]:
    found: set[str] = set()
    for info in filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True)):
        if (version := commit_version(info.base_name)) is not None:
            with suppress(ValueError, FileNotFoundError):
                found |= _paths(read_commit_actions(filesystem, root, version))
        elif checkpoint_version(info.base_name) is not None:
            with suppress(pa.ArrowException, ValueError, FileNotFoundError):
                found |= _paths(read_checkpoint(filesystem, root, [info.base_name], ("add", "remove")))
    return found


def _paths(actions: Iterable[dict[str, Any]]) -> set[str]:
    return {
        unquote(action[kind]["path"])
        for action in actions
        for kind in ("add", "remove")
        if action.get(kind) is not None
    }


def _remove_empty_folders(folder: Path) -> None:
    if not folder.is_dir():
        return
    for entry in folder.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            _remove_empty_folders(entry)
    with suppress(OSError):
        folder.rmdir()


def _is_folder(filesystem: fs.FileSystem, folder: str) -> bool:
    return bool(filesystem.get_file_info(folder).type == fs.FileType.Directory)


def _delete_if_empty(filesystem: fs.FileSystem, folder: str) -> None:
    """Delete a folder of a file system if it is empty.

    The operating system checks that it is empty: another program may write a file there at any time.
    """
    if not is_store(filesystem):  # In an object store, a folder exists only through the objects in it.
        with suppress(OSError):
            Path(folder).rmdir()
