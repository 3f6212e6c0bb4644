"""The data files of a table version as in the table's log, with their deletion vectors, and the log's damage.

deltalake's own list of files leaves out the vectors, and the original `add` action, which a commit has to
repeat to give the file another vector.

If a folder is restored from a copy, or after a power failure, commits that this package has seen can be
missing. Delta does not notice: the newest commit file is the newest version, and an empty file is a commit
without actions. So this module identifies commits by fingerprints and sets empty ones aside.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any
from urllib.parse import unquote

from deltalake import DeltaTable
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.delta.log import read_checkpoint, whole_checkpoints
from airflow_provider_pgrepl.replication.delta.recovery import find_torn
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.storage import (
    commit_mark,
    commit_version,
    log_path,
    open_storage,
    read_commit_actions,
    requests_at_once,
    storage_errors,
)
from airflow_provider_pgrepl.replication.storage.durable import local_path

from .deletion_vector import VectorRecord
from .ownership import TRANSACTION_RETENTION, Owner, read_ownership

COMMIT_METADATA = "pgrepl"
"""Key of this package's JSON in a commit's metadata: `{"kind", "position", "commit_ts"}`."""
# The fields of an `add` action (PROTOCOL.md, "Add File and Remove File").
_FIELDS = (
    *("path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"),
    *("baseRowId", "defaultRowCommitVersion", "clusteringProvider"),
)


def commit_fingerprint(uri: str, version: int) -> str:
    """Return a fingerprint that distinguishes the commit of a version from another one of the same version.

    Empty if the commit does not exist.
    """
    with storage_errors(uri, "read"):
        return commit_mark(uri, version)


def settle_log(uri: str, pipeline_name: str, confirmed_version: int | None = None) -> None:
    """Set aside the commits of a lake table from the first incomplete or empty one on.

    Call this only in the process that writes the table, while no other process does. The table's position is
    then that of the last remaining commit; the missing changes are in the changelog. `told` as in
    `find_torn`. Raises LakeTableError if the commit is in an object store, and for a table that this pipeline
    has not written: nothing in it is renamed then.
    """
    torn, first = find_torn(uri, confirmed_version=confirmed_version), first_empty_commit(uri)
    if first is not None and local_path(uri) is None:
        raise LakeTableError(f"{uri}: the file of its commit {first} is empty")
    if first is not None:
        rest = {version for version, _ in _commits_to_read(uri) if version >= first}
        torn = replace(torn, commits=tuple(sorted(rest | set(torn.commits))))
    if not torn:
        return
    found = read_ownership(uri, pipeline_name)
    if found.owner not in (Owner.PIPELINE, Owner.NOBODY):
        raise LakeTableError(
            f"{uri}: its log is damaged, and stays as it is, for this pipeline has not written the table:"
            f" {found.reason}",
            "move that folder away, or give the pipeline a lake root of its own",
        )
    torn.set_aside()


def first_empty_commit(uri: str) -> int | None:
    """Return the first version, after the last checkpoint, whose commit file is empty, or None.

    A crash of the host leaves such files. deltalake reads them as commits without changes.
    """
    return min((version for version, size in _commits_to_read(uri) if not size), default=None)


def _commits_to_read(uri: str) -> Iterator[tuple[int, int]]:
    """Yield the version, and the size in bytes, of each commit after the last checkpoint."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    last = next((version for version, _ in whole_checkpoints(infos)), -1)
    for info in infos:
        version = commit_version(info.base_name)
        if version is not None and version > last:
            yield version, info.size or 0


@dataclass(frozen=True)
class LiveFile:
    """One data file of a table.

    `action`: its `add` action in the log. `marked`: the number of rows that this action newly marked as
    deleted, as far as this process has seen.
    """

    action: Mapping[str, Any]
    marked: int = 0

    @cached_property
    def path(self) -> str:
        """The path below the table's folder."""
        return unquote(self.action["path"])

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """The statistics in the log; empty without any."""
        told: dict[str, Any] = json.loads(self.action.get("stats") or "{}")
        return told

    @property
    def partition(self) -> str | None:
        """The partition of its rows. Empty text counts as None, as in some readers."""
        return (self.action.get("partitionValues") or {}).get(PARTITION) or None

    @property
    def size(self) -> int:
        """The size in bytes."""
        return int(self.action["size"])

    @cached_property
    def vector(self) -> VectorRecord | None:
        """The deletion vector of its rows, or None without one."""
        return VectorRecord.of_action(self.action.get("deletionVector"))

    @property
    def vector_bytes(self) -> int:
        """An estimate of the bytes of vectors written for this file, as each commit rewrites its vector.

        Assumes that every commit marked as many rows as the last one. Then the number of commits is the
        number of marked rows divided by `marked`, and each wrote half of the present vector's size on
        average. 0 if there is no vector or `marked` is not known.
        """
        if self.vector is None or self.marked <= 0:
            return 0
        return self.vector.size * self.vector.rows // (2 * self.marked)


@dataclass(frozen=True)
class _Followed:
    """The content of a log up to a version. `apps`: for each app ID, the version in its last commit."""

    version: int
    fingerprint: str
    files: dict[str, LiveFile]
    apps: dict[str, int]


_followed: dict[str, _Followed] = {}
"""By table URI: the newest version up to which this process has read the log, and its content."""


def live_files(table: DeltaTable) -> dict[str, LiveFile]:
    """Return the data files of the version of the handle `table`, by their paths below the table's folder.

    Reads only the commits since the last call. Raises LakeTableError, LakeUnavailableError.
    """
    return _follow(table).files


def live_bytes(table: DeltaTable) -> int:
    """Return the bytes of the data files and vectors of that version. Raises what `live_files` does."""
    files = live_files(table).values()
    return sum(file.size + (0 if file.vector is None else file.vector.size) for file in files)


def app_version(table: DeltaTable, app: str) -> int | None:
    """Return the app version in the last commit with this app ID, as of the version of the handle `table`.

    Returns None if no commit has the app ID. deltalake's `transaction_version` reads all commits since the
    last checkpoint again, and leaves out app IDs that have expired by `TRANSACTION_RETENTION`. Checkpoints
    leave them out, too, but the commit files have them, and maintenance keeps those. Raises what `live_files`
    does.
    """
    apps = _follow(table).apps
    if app not in apps and has_retention(table):
        expired = _version_in_commits(table, app)
        if expired is not None:
            apps[app] = expired
    return apps.get(app)


def has_retention(table: DeltaTable) -> bool:
    """Return True if app IDs of the table expire, because another program has set `TRANSACTION_RETENTION`."""
    return TRANSACTION_RETENTION in table.metadata().configuration


def _version_in_commits(table: DeltaTable, app: str) -> int | None:
    """Return the app version in the newest existing commit file with this app ID; None if none has it."""
    filesystem, root = open_storage(table.table_uri)
    with storage_errors(table.table_uri, "read"), suppress(FileNotFoundError):
        for version in range(int(table.version()), -1, -1):
            for action in read_commit_actions(filesystem, root, version):
                if "txn" in action and action["txn"]["appId"] == app:
                    return int(action["txn"]["version"])
    return None


def apps_in_checkpoint(uri: str, version: int) -> set[str]:
    """Return the app IDs in the checkpoint of this version; empty if it has none.

    Raises LakeUnavailableError, and LakeError for other errors of the storage.
    """
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        found, names = _newest_checkpoint(filesystem, root, version)
        actions = read_checkpoint(filesystem, root, names, ("txn",)) if found == version else ()
        return {action["txn"]["appId"] for action in actions if "txn" in action}


def _follow(table: DeltaTable) -> _Followed:
    uri, version = table.table_uri, int(table.version())
    known, failed = _followed.get(uri), ""
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        is_usable = (
            known is not None
            and known.version <= version
            and commit_fingerprint(uri, known.version) == known.fingerprint
        )
        try:
            found = _read_up_to(filesystem, root, version, known if is_usable else None)
        except (FileNotFoundError, ValueError) as error:
            failed = type(error).__name__
    if failed:
        raise LakeTableError(f"{uri}: the log of version {version} cannot be read: {failed}")
    if found is known:
        return found
    found = replace(found, fingerprint=commit_fingerprint(uri, version))
    if known is None or not is_usable or known.version < version:
        _followed[uri] = found
    return found


def _read_up_to(filesystem: fs.FileSystem, root: str, version: int, known: _Followed | None) -> _Followed:
    """Return the log's content up to a version. Starts at `known`, or else at the newest checkpoint.

    Raises FileNotFoundError if a commit file is missing, ValueError if one cannot be parsed.
    """
    if known is None:
        known = _begin(filesystem, root, version)
    elif known.version == version:
        return known
    files, apps = dict(known.files), dict(known.apps)
    versions = range(known.version + 1, version + 1)
    try:
        with requests_at_once(filesystem, len(versions)) as each:
            for actions in each(partial(read_commit_actions, filesystem, root), versions):
                _take(files, apps, actions)
    except FileNotFoundError:
        # This process has not read the table for a long time, and another one has cleaned the log since.
        if not known.fingerprint:
            raise
        return _read_up_to(filesystem, root, version, None)
    return _Followed(version, "", files, apps)


def check_files(table: DeltaTable) -> None:
    """Raise LakeTableError if a data file or a vector of the table is missing or empty.

    Files are missing if the folder was restored from an incomplete copy, or from one that was made during a
    write.
    """
    uri = table.table_uri
    files = live_files(table)
    needed = {*files, *(file.vector.path for file in files.values() if file.vector and file.vector.path)}
    present = _present(uri, {path.rpartition("/")[0] for path in needed})
    if gone := needed - present:
        raise LakeTableError(f"{uri}: {len(gone)} of its {len(needed)} files are gone")


def _present(uri: str, folders: Collection[str]) -> set[str]:
    filesystem, root = open_storage(uri)
    with storage_errors(uri, "read"):
        infos = [
            info
            for folder in folders
            for info in filesystem.get_file_info(
                fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True)
            )
        ]
    return {info.path.removeprefix(f"{root}/") for info in infos if info.size}


def _begin(filesystem: fs.FileSystem, root: str, version: int) -> _Followed:
    """Return the content of the newest checkpoint at or before a version; empty and at -1 without one."""
    files: dict[str, LiveFile] = {}
    apps: dict[str, int] = {}
    newest, names = _newest_checkpoint(filesystem, root, version)
    for action in read_checkpoint(filesystem, root, names, ("add", "txn")):
        if "add" in action:
            file = LiveFile(_as_in_log(action["add"]))
            files[file.path] = file
        elif "txn" in action:
            apps[action["txn"]["appId"]] = action["txn"]["version"]
    return _Followed(newest, "", files, apps)


def _as_in_log(action: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an `add` of a checkpoint to its form in a commit: maps as objects, without parsed copies."""
    held = {name: action[name] for name in _FIELDS if action.get(name) is not None}
    return {**held, **{name: dict(held[name]) for name in ("partitionValues", "tags") if name in held}}


def _newest_checkpoint(filesystem: fs.FileSystem, root: str, version: int) -> tuple[int, list[str]]:
    """Return the version of the newest checkpoint at or before `version`, -1 without one, and its parts."""
    infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    return next((found for found in whole_checkpoints(infos) if found[0] <= version), (-1, []))


def _take(files: dict[str, LiveFile], apps: dict[str, int], actions: Iterable[Mapping[str, Any]]) -> None:
    """Apply the actions of one commit to `files` and `apps`.

    The actions of a commit have no order. A file that gets another vector is both removed and added.
    """
    actions = list(actions)
    gone: dict[str, int] = {}
    for action in actions:
        if "remove" in action:
            file = files.pop(unquote(action["remove"]["path"]), None)
            if file is not None:
                gone[file.path] = 0 if file.vector is None else file.vector.rows
    for action in actions:
        if "add" in action:
            file = LiveFile(action["add"])
            if file.vector is not None and file.path in gone:
                file = replace(file, marked=file.vector.rows - gone[file.path])
            files[file.path] = file
        elif "txn" in action:
            apps[action["txn"]["appId"]] = action["txn"]["version"]
