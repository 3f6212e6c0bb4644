"""Recovery of a Delta table after a crash of the host: finds torn commits at the log's end, and removes them.

No torn commit was reported before: a writer flushes first. deltalake accepts an empty commit as one without
actions, but cannot open a table with a partial commit or an incomplete checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.storage.durable import (
    LAST_CHECKPOINT,
    LOG_FOLDER,
    NEWEST,
    commit_file,
    commit_versions,
    flush_folder,
    local_path,
    read_actions,
    set_aside,
    set_aside_commits,
)
from airflow_provider_pgrepl.replication.storage.errors import storage_errors

from .log import checkpoint_version, sidecars, whole_checkpoints

log = logging.getLogger(__name__)

Actions = list[dict[str, Any]]
_LOCAL = fs.LocalFileSystem()
_PARQUET_END = b"PAR1"
_NONE = -1


@dataclass(frozen=True)
class LogDamage:
    """The damage of one table: the commits from the first torn one on, and the unreadable checkpoints.

    `has_wrong_hint`: True if `_last_checkpoint` is damaged, or names a version after the newest readable
    checkpoint.
    """

    uri: str
    commits: tuple[int, ...] = ()
    checkpoints: tuple[int, ...] = ()
    has_wrong_hint: bool = False

    def __bool__(self) -> bool:
        return bool(self.commits or self.checkpoints or self.has_wrong_hint)

    def set_aside(self) -> None:
        """Rename the torn commits and checkpoints, so that they no longer belong to the log.

        Only the table's writer may call this, while no other process writes. Raises LakeError,
        LakeUnavailableError.
        """
        root = local_path(self.uri)
        if root is None or not self:
            return
        folder = root / LOG_FOLDER
        with storage_errors(self.uri):
            for version in self.checkpoints:
                set_aside(folder, _files_of_checkpoint(folder, version))
            if self.has_wrong_hint:
                (folder / LAST_CHECKPOINT).unlink(missing_ok=True)
            set_aside_commits(folder, self.commits)
            flush_folder(folder)
        log.warning(
            "%s: the host stopped during a write; set aside %d unconfirmed commits from version %s,"
            " and %d checkpoints whose contents are also in commits",
            *(self.uri, len(self.commits), min(self.commits, default="none"), len(self.checkpoints)),
        )


def find_torn(
    uri: str,
    app: str | None = None,
    is_whole: Callable[[Actions], bool] = bool,
    confirmed_version: int | None = _NONE,
) -> LogDamage:
    """Find torn commits after the last readable checkpoint. Raises LakeError, LakeUnavailableError.

    `app`: the app ID under which the table's writer counts its commits. `is_whole`: returns True if a
    commit's actions are complete, as far as the writer can determine.

    `told`: the newest version that a consistent point or the state names; None if it is not known. A missing
    log file, or a missing or short data file, tears only commits above it: the files of a reported commit are
    on disk, and may only be invisible. None counts as "all reported"; the default as "none reported".
    """
    root = local_path(uri)
    if root is None or not (root / LOG_FOLDER).is_dir():
        return LogDamage(uri)
    with storage_errors(uri, "read"):
        base, unsound = _checkpoints(root)
        commits = _torn_commits(root, base, app, is_whole, confirmed_version)
        return LogDamage(uri, tuple(commits), tuple(unsound), _has_wrong_hint(root / LOG_FOLDER, base))


def find_torn_by_crash(
    uri: str, app: str | None = None, is_whole: Callable[[Actions], bool] = bool
) -> LogDamage:
    """Find torn commits, as `find_torn`, of a table whose reported version is not recorded.

    A crash leaves an incomplete file, and no complete commit after it: the name of a file is on disk no later
    than that of its commit, and a writer flushes all earlier commits before its own. A file that is missing
    otherwise, in the log or not, may only be invisible: then raises LakeError. Raises LakeUnavailableError.
    """
    torn, root = find_torn(uri, app, is_whole), local_path(uri)
    if root is not None:
        with storage_errors(uri, "read"):
            _check_left_by_crash(root, torn.commits, is_whole)
    return torn


def _check_left_by_crash(root: Path, commits: Sequence[int], is_whole: Callable[[Actions], bool]) -> None:
    folder = root / LOG_FOLDER
    read = {version: _read(folder, version) or [] for version in commits}
    torn = [version for version, actions in read.items() if not actions or not is_whole(actions)]
    whole = {version: actions for version, actions in read.items() if version not in torn}
    if torn and max(whole, default=_NONE) > torn[0]:
        raise LakeError(
            f"commit {torn[0]} of {root} is not whole, and commit {max(whole)} is. Nothing was changed",
            _way_out(folder, torn[0]),
        )
    first, named = min(commits, default=0), ""
    if whole and not commit_file(folder, first - 1).exists() and first - 1 != _checkpoints(root)[0]:
        raise LakeError(
            f"commit {first - 1} of {root} is not there, and commit {first} is. Nothing was changed",
            _way_out(folder, first),
        )
    gone = {unquote(path) for path in _paths("remove", whole.values())}
    for actions in whole.values():
        added = {unquote(add["add"]["path"]): add["add"] for add in actions if "add" in add}
        lacking = [path for path, add in added.items() if path not in gone and not _is_there(root, add)]
        named = named or lacking[0]
        if lacking and all((root / path).exists() for path in lacking):
            continue
        fate = "not whole" if (root / named).exists() else "not there"
        raise LakeError(
            f"commit {first} of {root} names the file {named}, which is {fate}. Nothing was changed",
            _way_out(folder, first),
        )


def _way_out(folder: Path, first: int) -> str:
    return (
        "check that the storage shows all files of the lake (mount, unfinished copy), and start again. If the"
        f" file is lost, restore {folder.parent} as a whole from a copy of this lake. Without such a copy,"
        f" first copy {folder.parent}, then rename {commit_file(folder, first)} and the later commits, newest"
        " first, to end in .torn: their changes are lost, and if they were the changelog's and the slot has"
        " confirmed them, the pipeline needs a new epoch"
    )


def _checkpoints(root: Path) -> tuple[int, list[int]]:
    """Return the version of the newest readable checkpoint (-1 for none), and the unreadable newer ones.

    The newer ones are left out unless the log has all commits that they cover.
    """
    folder, versions = root / LOG_FOLDER, set(commit_versions(root / LOG_FOLDER))
    infos = _LOCAL.get_file_info(fs.FileSelector(str(folder)))
    whole = whole_checkpoints(infos)
    sound = next((version for version, names in whole if _can_be_read(root, names)), _NONE)
    found = {version for info in infos if (version := checkpoint_version(info.base_name)) is not None}
    unsound = sorted((version for version in found if version > sound), reverse=True)
    is_covered = not unsound or set(range(sound + 1, unsound[0] + 1)) <= versions
    return sound, unsound if is_covered else []


def _can_be_read(root: Path, names: Sequence[str]) -> bool:
    """Return True if the files of a checkpoint, and the sidecars that they name, are complete."""
    try:
        for name in names:
            if name.endswith(".parquet"):
                pq.read_metadata(root / LOG_FOLDER / name)
            for sidecar in sidecars(_LOCAL, str(root), name):
                pq.read_metadata(sidecar)
    except (pa.ArrowException, ValueError, FileNotFoundError):
        return False
    return True


def _files_of_checkpoint(folder: Path, version: int) -> list[Path]:
    return [path for path in folder.iterdir() if checkpoint_version(path.name) == version]


def _has_wrong_hint(folder: Path, sound: int) -> bool:
    """Return True if `_last_checkpoint` names a version newer than `sound`, or is damaged.

    Readers look for the checkpoint that it names, and report a damaged table if there is none.
    """
    hint = folder / LAST_CHECKPOINT
    if not hint.exists():
        return False
    try:
        return bool(json.loads(hint.read_bytes())["version"] > sound)
    except (ValueError, KeyError, TypeError):
        return True


def _torn_commits(
    root: Path, base: int, app: str | None, is_whole: Callable[[Actions], bool], confirmed_version: int | None
) -> list[int]:
    folder = root / LOG_FOLDER
    versions = [version for version in commit_versions(folder) if version > base]
    # A crash does not leave a log without a checkpoint that does not begin at version 0.
    if base == _NONE and 0 not in versions:
        return []
    read: dict[int, Actions] = {}
    for expected, version in enumerate(versions, base + 1):
        if version != expected and (confirmed_version is None or expected <= confirmed_version):
            return []
        actions = _read(folder, version)
        if version != expected or actions is None or (actions and not is_whole(actions)):
            break
        read[version] = actions
    whole = _without_empty_end(read, app)
    lacking = _lacking_files(root, [read[version] for version in whole])
    if lacking and confirmed_version is not None and whole[-lacking] > confirmed_version:
        whole = whole[:-lacking]
    return versions[len(whole) :]


def _read(folder: Path, version: int) -> Actions | None:
    """Return a commit's actions, None if it is torn. An empty commit has no actions, as in deltalake."""
    try:
        return read_actions(folder, version)
    except ValueError:
        return None


def _without_empty_end(read: dict[int, Actions], app: str | None) -> list[int]:
    """Return the versions before the first torn empty commit.

    An empty commit is torn if no commit follows it, or if the writer's count of commits shows that it was
    one of them. Another empty commit that was followed has lost nothing: the later writer saw it as empty.
    """
    kept: list[int] = []
    pending: list[int] = []
    last: int | None = None
    for version, actions in read.items():
        pending.append(version)
        if not actions:
            continue
        count = next((a["txn"]["version"] for a in actions if "txn" in a and a["txn"]["appId"] == app), None)
        if len(pending) > 1 and None not in (last, count) and count != (last or 0) + 1:
            break
        last = last if count is None else count
        kept += pending
        pending = []
    return kept


def _lacking_files(root: Path, commits: list[Actions]) -> int:
    """Return the number of newest commits from the first one on that added a missing or incomplete file.

    Files that a commit removes are not checked. Checks at most NEWEST commits.
    """
    gone = {unquote(path) for path in _paths("remove", commits)}
    newest = commits[-NEWEST:]
    for place, actions in enumerate(newest):
        adds = [action["add"] for action in actions if "add" in action]
        if not all(_is_there(root, add) for add in adds if unquote(add["path"]) not in gone):
            return len(newest) - place
    return 0


def _paths(kind: str, commits: Iterable[Actions]) -> Iterable[str]:
    return (action[kind]["path"] for actions in commits for action in actions if kind in action)


def _is_there(root: Path, add: dict[str, Any]) -> bool:
    path, size = root / unquote(add["path"]), add["size"]
    if not path.is_file() or path.stat().st_size != size or size < len(_PARQUET_END):
        return False
    with path.open("rb") as file:
        file.seek(-len(_PARQUET_END), os.SEEK_END)
        return file.read() == _PARQUET_END
