"""Flushing of Delta tables on a file system: commits and their files are on disk before they are reported.

The process that commits flushes, on the host where it wrote, before its next commit. It also flushes before
it reports the commit to the slot, a consistent point or the state. After a crash of the host, only the few
newest versions can therefore be incomplete. An object store needs no flush: an acknowledged write is durable.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

LOG_FOLDER = "_delta_log"
LAST_CHECKPOINT = "_last_checkpoint"
NEWEST = 8
"""The number of newest commits that may not be flushed yet: one for each process or thread that writes."""

# Errors of file systems that cannot flush a folder, or do not allow opening it.
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)


@lru_cache(maxsize=4096)
def local_path(uri: str) -> Path | None:
    """Return the path of a URI of a file system, such as a lake or a folder below it; None for a store."""
    if uri.startswith("file://"):
        return Path(unquote(uri.removeprefix("file://")))
    return None if "://" in uri else Path(uri)


def is_same_place(one: str, other: str) -> bool:
    """Return True if two paths resolve to the same folder of this host, or two URIs are equal."""
    paths = local_path(one), local_path(other)
    if paths[0] is None or paths[1] is None:
        return one == other
    return os.path.realpath(paths[0]) == os.path.realpath(paths[1])


def flush_file(path: Path) -> None:
    """Flush a file's content to disk (fsync), also if another process wrote it. Raises OSError."""
    with _opened(path) as file:
        os.fsync(file)


def flush_folder(path: Path) -> None:
    """Flush a folder's entries to disk (fsync), if the file system supports it. Raises OSError."""
    try:
        with _opened(path) as folder:
            os.fsync(folder)
    except OSError as error:
        if error.errno not in _NO_FOLDERS:
            raise


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def flush_files(uri: str, names: Iterable[str]) -> None:
    """Flush files below `uri`, and their parent folders up to `uri`, to disk (fsync).

    Does nothing for an object store. Raises OSError.
    """
    root = local_path(uri)
    if root is None:
        return
    paths = [root / name for name in names]
    for path in paths:
        flush_file(path)
    for folder in _between(root, paths):
        flush_folder(folder)


def _between(root: Path, paths: Iterable[Path]) -> set[Path]:
    return {
        folder for path in paths for folder in path.parents if folder == root or folder.is_relative_to(root)
    }


def flush_commits(uri: str, above: int, upto: int, *, with_files: bool = True) -> None:
    """Flush this process's new commits after version `above`, up to `upto`, with the files that they add.

    `with_files`: False if the added files are already on disk. If flushing fails, the commits are set aside,
    so that no reader uses a commit that is only in the page cache. They stay if a later commit is more than
    a marker. Raises OSError in both cases.
    """
    root = local_path(uri)
    if root is None or upto <= above:
        return
    log, versions = root / LOG_FOLDER, range(above + 1, upto + 1)
    try:
        if with_files:
            flush_files(uri, _added(log, versions))
        _flush_log(log, versions)
    except OSError:
        _set_aside_from(log, above + 1, upto)
        raise


def _set_aside_from(log: Path, first: int, upto: int) -> None:
    """Set aside all commits from `first` on, unless a commit after `upto` is more than a marker.

    Repeats until none is left: a marker that is committed in between must not stay above a gap.
    """
    while versions := [version for version in commit_versions(log) if version >= first]:
        if any(_says_more(log, version) for version in versions if version > upto):
            return
        set_aside_commits(log, versions)
        if commit_file(log, versions[0]).exists():
            return


def _says_more(log: Path, version: int) -> bool:
    """Return True if a commit has other actions than `commitInfo`, or cannot be read.

    A commit that has only `commitInfo` is a marker, which only increments the version.
    """
    try:
        return any(set(action) != {"commitInfo"} for action in read_actions(log, version))
    except (OSError, ValueError):
        return True


def flush_newest(uri: str, own: int | None = None) -> None:
    """Flush the NEWEST commits with their files, in case a process died before flushing. Raises OSError.

    `own`: the version that this process has committed. It is flushed with the NEWEST before it, and set aside
    as in `flush_commits`.
    """
    root = local_path(uri)
    if root is None or not (root / LOG_FOLDER).is_dir():
        return
    log = root / LOG_FOLDER
    versions = [version for version in commit_versions(log) if own is None or version < own][-NEWEST:]
    flush_files(uri, (name for name in _added(log, versions) if (root / name).exists()))
    _flush_log(log, versions)
    if own is not None:
        flush_commits(uri, own - 1, own)


def _flush_log(log: Path, versions: Sequence[int]) -> None:
    for version in versions:
        with suppress(FileNotFoundError):  # maintenance may have deleted an old commit
            flush_file(commit_file(log, version))
        # Some commits write a checkpoint.
        with suppress(FileNotFoundError):
            flush_file(checkpoint_file(log, version))
            flush_file(log / LAST_CHECKPOINT)
    flush_folder(log)
    if 0 in versions:
        # The table is new, and its parent folders may be new, too.
        for folder in log.parents:
            flush_folder(folder)


def flush_checkpoint(uri: str, version: int) -> None:
    """Flush a checkpoint to disk, before the log entries that it replaces are deleted. Raises OSError."""
    root = local_path(uri)
    if root is not None:
        _flush_log(root / LOG_FOLDER, [version])


def commit_file(log: Path, version: int) -> Path:
    """Return the path of a commit's file."""
    return log / f"{version:020d}.json"


def checkpoint_file(log: Path, version: int) -> Path:
    """Return the path of a single-file checkpoint, as deltalake writes it."""
    return log / f"{version:020d}.checkpoint.parquet"


def commit_versions(log: Path) -> list[int]:
    """Return the versions that have a commit file in a log, oldest first."""
    names = (entry.name for entry in os.scandir(log) if entry.name.endswith(".json"))
    return sorted(int(name[:20]) for name in names if name[:20].isdecimal() and len(name) == 25)


def read_actions(log: Path, version: int) -> list[dict[str, dict[str, object]]]:
    """Return a commit's actions; an empty list for an empty file.

    Raises ValueError if the commit is incomplete, OSError.
    """
    actions = [json.loads(line) for line in commit_file(log, version).read_bytes().splitlines()]
    if not all(isinstance(action, dict) for action in actions):
        raise ValueError(f"version {version} is not a commit")
    return actions


def _added(log: Path, versions: Iterable[int]) -> list[str]:
    """Return the files that these versions add, and that none of them removes again."""
    added: dict[str, None] = {}
    for version in versions:
        with suppress(FileNotFoundError, ValueError):
            for action in read_actions(log, version):
                if "remove" in action:
                    added.pop(unquote(str(action["remove"]["path"])), None)
                if "add" in action:
                    added[unquote(str(action["add"]["path"]))] = None
    return list(added)


def set_aside_commits(log: Path, versions: Iterable[int]) -> None:
    """Rename commits and their checkpoints, so that they no longer belong to the log.

    Starts with the newest: if this is interrupted, the remaining log has no gap. Files that cannot be renamed
    stay.
    """
    for version in sorted(versions, reverse=True):
        set_aside(log, (checkpoint_file(log, version), commit_file(log, version)))


def set_aside(log: Path, files: Iterable[Path]) -> None:
    """Rename files to `.NAME.torn`, which readers ignore and maintenance later deletes.

    Errors are ignored.
    """
    for path in files:
        with suppress(OSError):
            path.rename(path.with_name(f".{path.name}.torn"))
    with suppress(OSError):
        flush_folder(log)
