"""Ownership of a lake table, determined by evidence that only this package leaves: app IDs in its Delta log.

This module reads the log itself instead of through deltalake: an error of a library, a path or a name is no
evidence.

The marks of a lake table are two app IDs in its log: one names its path below the lake root, the other its
lake. A copy of its folder has the same marks, but another path or lake. Marks are app IDs because checkpoints
keep app IDs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import fs

from airflow_provider_pgrepl.errors import ChangelogError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.delta.log import read_checkpoint, whole_checkpoints
from airflow_provider_pgrepl.replication.runtime.quantities import show_list
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.storage import (
    commit_version,
    log_path,
    open_storage,
    read_commit_actions,
    storage_errors,
)
from airflow_provider_pgrepl.replication.storage.durable import LOG_FOLDER, local_path
from airflow_provider_pgrepl.replication.storage.errors import find_store_fault

PATH_APP = "pgrepl-path:"
"""Prefix of the Delta app ID that ends with the table's path below the lake root."""
ADOPTED_APP = "pgrepl-adopted"
"""Delta app ID: 1 if live files of other programs have become the pipeline's, 0 after a later snapshot."""
_UUID = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
_WRITTEN = re.compile(
    rf"(?:{PARTITION}=[^/]*/)?(?:part-{_UUID}(?:\.zstd)?\.parquet|deletion_vector_{_UUID}\.bin)"
    r"|\d{4}-\d\d-\d\dT\d\d/[0-9a-f]{32}-\d+\.parquet"
)
_NAMED = 3
NOT_MARKED = "its log does not say which table it is, and neither state nor a consistent point names it"
TRANSACTION_RETENTION = "delta.setTransactionRetentionDuration"
"""The table property that makes checkpoints leave out older app IDs. Commit files keep them."""


def path_mark(uri: str) -> str:
    """Return the app ID that names the path of a lake table, or a history, below the lake root."""
    return f"{PATH_APP}{_split(uri)[1]}"


def table_marks(uri: str) -> dict[str, int]:
    """Return the marks of the table at `uri`, for a commit. Without a changelog, the lake's mark is left out.

    Raises LakeUnavailableError.
    """
    lake = lake_mark(_split(uri)[0])
    return {path_mark(uri): 1} | ({} if lake is None else {lake: 1})


def lake_mark(lake_root: str) -> str | None:
    """Return the app ID that marks tables of this lake, or None without a changelog.

    Raises LakeUnavailableError.
    """
    try:
        return f"{LAKE_APP}{lake_id(open_changelog(changelog_uri(lake_root)))}"
    except ChangelogError:
        return None


def copied_from(uri: str, apps: Collection[str]) -> str | None:
    """Return the path of the table whose folder was copied to `uri`, or None if the folder is no copy.

    `apps`: the app IDs in the log at `uri`.
    """
    paths = [app for app in apps if app.startswith(PATH_APP)]
    return paths[0].removeprefix(PATH_APP) if paths and path_mark(uri) not in paths else None


def reason_of_lake(uri: str, apps: Collection[str]) -> str | None:
    """Return why the table at `uri` may belong to another lake than the one that it lies in.

    Returns None if its app IDs have the mark of this lake, or of no lake. Raises LakeUnavailableError.
    """
    lakes = {app for app in apps if app.startswith(LAKE_APP)}
    if not lakes:
        return None
    try:
        changelog = open_changelog(changelog_uri(_split(uri)[0]))
    except ChangelogError:
        return "it is of a lake whose changelog is not there"
    own = f"{LAKE_APP}{lake_id(changelog)}"
    # A changelog that replaced a lost one has the mark of the lost one.
    if own in lakes or any(changelog.transaction_version(lake) is not None for lake in lakes):
        return None
    return f"it is of another lake, {min(lakes).removeprefix(LAKE_APP)}"


def _split(uri: str) -> tuple[str, str]:
    """Return the lake root of a table, and the table's path below it."""
    local = local_path(uri)
    root, *path = (uri.rstrip("/") if local is None else str(local)).rsplit("/", 2)
    return root, "/".join(path)


class Owner(Enum):
    """The owner of a table's folder. `UNKNOWN`: evidence is missing, so the folder must not be changed."""

    NOBODY = "nobody"
    PIPELINE = "this pipeline"
    OTHER = "another program"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Ownership:
    """The owner of a table's folder, and the evidence, as the end of a sentence about the folder.

    `is_marked`: the log names this path as the table's. Earlier versions did not mark tables, so a folder
    without a mark may be a copy of another table's folder. `is_adoptable`: it is a Delta table that only
    programs other than this package have written.
    """

    owner: Owner
    reason: str = ""
    is_marked: bool = False
    is_adoptable: bool = False


def is_written_name(path: str) -> bool:
    """Return True if only this package gives files such a name. `path`: below the table's folder."""
    return _WRITTEN.fullmatch(path) is not None


def is_link(uri: str) -> bool:
    """Return True if the folder of a table or of its schema is a symbolic link, so that it lies elsewhere."""
    local = local_path(uri)
    return local is not None and (local.is_symlink() or local.parent.is_symlink())


def _other_spelling(uri: str) -> str | None:
    """Return the name of the folder, or of its parent, on a file system that ignores case, if it is another.

    Returns None if the names are as in `uri`, if a folder does not exist, or in an object store.
    """
    local = local_path(uri)
    if local is None:
        return None
    for path in (local.parent, local):
        if path.exists() and path.name not in (names := {one.name for one in path.parent.iterdir()}):
            return next((name for name in names if name.casefold() == path.name.casefold()), path.name)
    return None


def read_ownership(uri: str, pipeline_name: str) -> Ownership:
    """Return the owner of the folder `uri`, which a lake table of this pipeline is to have.

    The owner is `Owner.NOBODY` if the folder does not exist, or if no Delta log can be read in it and it
    holds nothing but files whose names only this package gives. Raises LakeUnavailableError or LakeError if
    the storage does not answer: nothing is known then.
    """
    if is_link(uri):
        return Ownership(Owner.UNKNOWN, "its folder is a symbolic link")
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        if (name := _other_spelling(uri)) is not None:
            return Ownership(Owner.UNKNOWN, f"the file system ignores case, and the folder is that of {name}")
        kind = filesystem.get_file_info(root).type
        if kind == fs.FileType.File:
            return Ownership(Owner.UNKNOWN, "it is a file")
        if kind == fs.FileType.NotFound:
            return Ownership(Owner.NOBODY)
        entries = _log_entries(filesystem, root)
        if not entries:
            return _by_names(filesystem, root, "it has no Delta log, but holds")
        apps, metadata = _read_apps(filesystem, root, entries)
    if any(is_app_of(app, pipeline_name) for app in apps):
        if (original := copied_from(uri, apps)) is not None:
            return Ownership(Owner.OTHER, f"it is a copy of the folder of {original}")
        if (reason := reason_of_lake(uri, apps)) is not None:
            return Ownership(Owner.UNKNOWN, reason)
        return Ownership(Owner.PIPELINE, is_marked=path_mark(uri) in apps)
    if apps or metadata:
        reason = f"no commit in its Delta log is of pipeline {pipeline_name}"
        marked = any(app.startswith((PATH_APP, LAKE_APP)) for app in apps)
        return Ownership(Owner.OTHER, reason, is_adoptable=not marked)
    return _by_names(filesystem, root, "no commit of its Delta log can be read, and it holds")


def check_replaceable(uri: str, pipeline_name: str, is_known: Callable[[], bool] = lambda: True) -> None:
    """Raise LakeTableError unless the folder is this pipeline's table or has no owner.

    `is_known`: called if the table has no marks; returns True if the state or a consistent point records the
    table as copied. Also raises LakeUnavailableError, LakeError.
    """
    found = read_ownership(uri, pipeline_name)
    reason = None if found.owner in (Owner.PIPELINE, Owner.NOBODY) else found.reason
    if found.owner is Owner.PIPELINE and not (found.is_marked or is_known()):
        reason = NOT_MARKED
    if reason is not None:
        adopt = (
            ". If it is a Delta table with the rows of the source, pgrepl snapshot FILE.json --adopt NAME"
            " keeps them"
        )
        raise LakeTableError(
            f"{uri} is a folder that this pipeline has not written: {reason}. Nothing was changed",
            "give the pipeline a lake root of its own, or move that folder away"
            + (adopt if found.is_adoptable else ""),
        )


def check_former(uri: str, pipeline_name: str, former_lake: str, *, is_copied: bool) -> int:
    """Return the highest epoch in which a pipeline of this name has written the table; 0 if none has.

    For a lake without a changelog. Raises LakeError if such a pipeline has written the table, unless the
    state records the table as copied (`is_copied`) and it has no mark of another lake than the one with the
    id `former_lake`. Raises LakeUnavailableError.
    """
    apps = read_apps(uri)
    epochs = [int(app.rpartition(":")[2]) for app in apps if is_app_of(app, pipeline_name)]
    if not epochs:
        return 0
    lakes = {app for app in apps if app.startswith(LAKE_APP)}
    if is_copied and lakes <= {f"{LAKE_APP}{former_lake}"}:
        return max(epochs)
    raise LakeError(
        f"{uri} was written by a pipeline named {pipeline_name}, and there is no changelog in this lake that"
        " says which. Nothing was changed",
        "mount or restore the folder _pgrepl of that lake. If it is lost, move the table's folder away and"
        " keep it: with history: true it has the current versions",
    )


def read_apps(uri: str) -> Mapping[str, int]:
    """Return the app IDs in the log of a table; empty without a log. Raises what `read_ownership` does."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        return _read_apps(filesystem, root, _log_entries(filesystem, root))[0]


def is_app_of(app: str, pipeline_name: str) -> bool:
    """Return True if `app` is the app ID of any epoch of the pipeline."""
    name, _, epoch = app.rpartition(":")
    return name == pipeline_name and epoch.isdecimal()


def _by_names(filesystem: fs.FileSystem, root: str, but: str) -> Ownership:
    with storage_errors(root, "read"):
        others = [path for path in table_files(filesystem, root) if not is_written_name(path)]
    if not others:
        return Ownership(Owner.NOBODY)
    return Ownership(Owner.UNKNOWN, f"{but} {show_list(sorted(others), _NAMED)}")


def table_files(filesystem: fs.FileSystem, root: str) -> Iterator[str]:
    """Yield the paths, below `root`, of all files except those of its own Delta log.

    A symbolic link counts as a file and is not followed. Raises OSError.
    """
    if not isinstance(filesystem, fs.LocalFileSystem):
        for info in filesystem.get_file_info(fs.FileSelector(root, recursive=True, allow_not_found=True)):
            path = info.path.removeprefix(f"{root}/")
            if info.type == fs.FileType.File and not path.startswith(f"{LOG_FOLDER}/"):
                yield path
        return
    for at, folders, files in os.walk(root, onerror=_raise):
        folder = Path(at)
        links = [name for name in folders if (folder / name).is_symlink()]
        if folder == Path(root) and LOG_FOLDER in folders and LOG_FOLDER not in links:
            folders.remove(LOG_FOLDER)
        for name in (*files, *links):
            yield str((folder / name).relative_to(root))


def _raise(error: OSError) -> None:
    raise error


def _log_entries(filesystem: fs.FileSystem, root: str) -> list[fs.FileInfo]:
    infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    return [info for info in infos if info.type == fs.FileType.File]


def _read_apps(
    filesystem: fs.FileSystem, root: str, entries: list[fs.FileInfo]
) -> tuple[Mapping[str, int], bool]:
    """Return the app IDs as of the newest readable version, and True if any table metadata was read."""
    versions = (commit_version(info.base_name) for info in entries)
    commits = sorted(version for version in versions if version is not None)
    base, known = -1, _Known()
    for version, names in whole_checkpoints(entries):
        found = _read_checkpoint(filesystem, root, names)
        if found is not None:
            base, known = version, found
            break
    # Each commit is read separately. One that is torn or missing is no evidence, but the others are.
    for version in commits:
        if version > base:
            known.take(_read_actions(filesystem, root, version))
    if known.lets_apps_expire:
        older = _Known()
        for version in commits:
            if version <= base:
                older.take(_read_actions(filesystem, root, version))
        known.apps = older.apps | known.apps
    return known.apps, known.configuration is not None


@dataclass
class _Known:
    """The app IDs and the table properties in actions of a log. `configuration`: None without metadata."""

    apps: dict[str, int] = field(default_factory=dict)
    configuration: Mapping[str, str] | None = None

    def take(self, actions: Iterable[dict[str, Any]]) -> None:
        for action in actions:
            if "txn" in action:
                self.apps[action["txn"]["appId"]] = action["txn"]["version"]
            if "metaData" in action:
                self.configuration = dict(action["metaData"].get("configuration") or {})

    @property
    def lets_apps_expire(self) -> bool:
        return TRANSACTION_RETENTION in (self.configuration or {})


def _read_checkpoint(filesystem: fs.FileSystem, root: str, names: list[str]) -> _Known | None:
    known = _Known(configuration={})
    try:
        known.take(read_checkpoint(filesystem, root, names, ("txn", "metaData")))
    except (pa.ArrowException, OSError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, OSError) and (error.errno is not None or find_store_fault(error)):
            raise
        return None
    return known


def _read_actions(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    try:
        actions = read_commit_actions(filesystem, root, version)
    except (ValueError, FileNotFoundError):
        return []
    return [action for action in actions if isinstance(action, dict)]
