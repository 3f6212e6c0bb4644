"""The data files of a version of a table as its log has them, with what marks rows in them as gone.

deltalake's own list of them leaves out the vectors, and the words of the log that a file which gets another
vector is to be named by again.

The files of a Delta log's commits: which one stands for a version, and those that hold nothing.
A folder that is put back, and a power cut, take commits away that this product has seen. Delta does not mind:
the newest file that is there is the newest version, and a file without content is a commit without actions.
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
from airflow_provider_pgrepl.replication.delta.checkpoints import read_checkpoint, whole_checkpoints
from airflow_provider_pgrepl.replication.delta.recovery import find_torn
from airflow_provider_pgrepl.replication.lake.delta.deletion_vector import VectorRecord
from airflow_provider_pgrepl.replication.lake.delta.ownership import (
    TRANSACTION_RETENTION,
    Owner,
    read_ownership,
)
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

COMMIT_METADATA = "pgrepl"
"""Key of our JSON in a commit's metadata: `{"kind", "position", "commit_ts"}`."""
# What an `add` may hold (PROTOCOL.md, "Add File and Remove File").
_FIELDS = (
    *("path", "partitionValues", "size", "modificationTime", "dataChange", "stats", "tags", "deletionVector"),
    *("baseRowId", "defaultRowCommitVersion", "clusteringProvider"),
)


def commit_fingerprint(uri: str, version: int) -> str:
    """What tells the commit of a version from another in its place; empty when there is none."""
    with storage_errors(uri):
        return commit_mark(uri, version)


def settle_log(uri: str, pipeline_name: str, told: int | None = None) -> None:
    """Have a lake table go back to before the first commit that is not whole, or holds nothing.

    For who writes the table while nobody else does. Its position says where it is then; what it lacks is in
    the changelog. `told` as in `find_torn`. Raises LakeTableError where no commit can be set aside, and for a
    table that another program has written: nothing in it is renamed.
    """
    torn, commits = find_torn(uri, told=told), dict(_commits_to_read(uri))
    first = min((version for version, size in commits.items() if not size), default=None)
    if first is not None and local_path(uri) is None:
        raise LakeTableError(f"{uri}: the file of its commit {first} is empty")
    if first is not None:
        rest = {version for version in commits if version >= first}
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


def _commits_to_read(uri: str) -> Iterator[tuple[int, int]]:
    """Versions and sizes of the commits after the last checkpoint: what was before is in that."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    last = next((version for version, _ in whole_checkpoints(infos)), -1)
    for info in infos:
        version = commit_version(info.base_name)
        if version is not None and version > last:
            yield version, info.size or 0


@dataclass(frozen=True)
class LiveFile:
    """One data file of a table. `action`: the `add` by which the log names it; `marked`: how many more of its
    rows than before are gone by that, as far as this process has seen."""

    action: Mapping[str, Any]
    marked: int = 0

    @cached_property
    def path(self) -> str:
        """Below the table's folder."""
        return unquote(self.action["path"])

    @cached_property
    def statistics(self) -> dict[str, Any]:
        """What the log says of its rows and values; empty when nothing."""
        told: dict[str, Any] = json.loads(self.action.get("stats") or "{}")
        return told

    @property
    def partition(self) -> str | None:
        """That of its rows; what is empty is none, as some readers have it."""
        return (self.action.get("partitionValues") or {}).get(PARTITION) or None

    @property
    def size(self) -> int:
        """Bytes."""
        return int(self.action["size"])

    @cached_property
    def vector(self) -> VectorRecord | None:
        """Of the rows in it that are gone."""
        return VectorRecord.of_action(self.action.get("deletionVector"))

    @property
    def vector_bytes(self) -> int:
        """What its vectors have cost: each commit that marks rows in it writes its vector whole. As if all
        had marked as many as the last one, half the present one's size was written that many times."""
        if self.vector is None or self.marked <= 0:
            return 0
        return self.vector.size * self.vector.rows // (2 * self.marked)


@dataclass(frozen=True)
class _Followed:
    """What the log says up to a version. `apps`: by app id the last version that a commit gave it."""

    version: int
    fingerprint: str
    files: dict[str, LiveFile]
    apps: dict[str, int]


_followed: dict[str, _Followed] = {}
"""By the table's URI: the newest version that this process has read the log up to."""


def live_files(table: DeltaTable) -> dict[str, LiveFile]:
    """The data files of the version at which a handle stands, by their path below the table's folder.

    Costs the reading of the commits since the last time. Raises LakeTableError, LakeUnavailableError.
    """
    return _follow(table).files


def live_bytes(table: DeltaTable) -> int:
    """The bytes of the data files and vectors of that version. Raises what `live_files` does."""
    files = live_files(table).values()
    return sum(file.size + (0 if file.vector is None else file.vector.size) for file in files)


def app_version(table: DeltaTable, app: str) -> int | None:
    """What the last commit with this app id gave it, as of the version at which a handle stands.

    deltalake's `transaction_version` reads all commits since the last checkpoint anew, and leaves out what
    `TRANSACTION_RETENTION` lets expire. Checkpoints then lack it, too, but not the commit that gave it, which
    maintenance keeps. Raises what `live_files` does.
    """
    apps = _follow(table).apps
    if app not in apps and has_retention(table):
        expired = _version_in_commits(table, app)
        if expired is not None:
            apps[app] = expired
    return apps.get(app)


def has_retention(table: DeltaTable) -> bool:
    """Whether another program lets the app ids of the table expire."""
    return TRANSACTION_RETENTION in table.metadata().configuration


def _version_in_commits(table: DeltaTable, app: str) -> int | None:
    """What the newest commit with this app id gave it; None if none of those that are there has it."""
    filesystem, root = open_storage(table.table_uri)
    with storage_errors(table.table_uri), suppress(FileNotFoundError):
        for version in range(int(table.version()), -1, -1):
            for action in read_commit_actions(filesystem, root, version):
                if "txn" in action and action["txn"]["appId"] == app:
                    return int(action["txn"]["version"])
    return None


def apps_in_checkpoint(uri: str, version: int) -> set[str]:
    """The app ids that the checkpoint of a version has. Raises what `live_files` does."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        found, names = _newest_checkpoint(filesystem, root, version)
        actions = read_checkpoint(filesystem, root, names, ("txn",)) if found == version else ()
        return {action["txn"]["appId"] for action in actions if "txn" in action}


def _follow(table: DeltaTable) -> _Followed:
    uri, version = table.table_uri, int(table.version())
    known, failed = _followed.get(uri), ""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
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
    """From what is known, or else from the newest checkpoint on. Raises FileNotFoundError."""
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
        # Of a table that this process has not seen for long, others have cleaned the log meanwhile.
        if not known.fingerprint:
            raise
        return _read_up_to(filesystem, root, version, None)
    return _Followed(version, "", files, apps)


def check_files(table: DeltaTable) -> None:
    """Raises LakeTableError when a file that a table consists of is not there: a folder may have been put
    back, or copied while it was written, without all that its log names."""
    uri = table.table_uri
    files = live_files(table)
    needed = {*files, *(file.vector.path for file in files.values() if file.vector and file.vector.path)}
    present = _present(uri, {path.rpartition("/")[0] for path in needed})
    if gone := needed - present:
        raise LakeTableError(f"{uri}: {len(gone)} of its {len(needed)} files are gone")


def _present(uri: str, folders: Collection[str]) -> set[str]:
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        infos = [
            info
            for folder in folders
            for info in filesystem.get_file_info(
                fs.FileSelector(f"{root}/{folder}".rstrip("/"), allow_not_found=True)
            )
        ]
    return {info.path.removeprefix(f"{root}/") for info in infos if info.size}


def _begin(filesystem: fs.FileSystem, root: str, version: int) -> _Followed:
    """What the newest checkpoint at or before a version has."""
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
    """An `add` of a checkpoint as a commit has it: maps are objects, and there are no parsed copies."""
    held = {name: action[name] for name in _FIELDS if action.get(name) is not None}
    return {**held, **{name: dict(held[name]) for name in ("partitionValues", "tags") if name in held}}


def _newest_checkpoint(filesystem: fs.FileSystem, root: str, version: int) -> tuple[int, list[str]]:
    """Its version, -1 when there is none, and the names of its parts."""
    infos = filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True))
    return next((found for found in whole_checkpoints(infos) if found[0] <= version), (-1, []))


def _take(files: dict[str, LiveFile], apps: dict[str, int], actions: Iterable[Mapping[str, Any]]) -> None:
    """A commit's actions have no order: a file that gets another vector is both removed and added."""
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
