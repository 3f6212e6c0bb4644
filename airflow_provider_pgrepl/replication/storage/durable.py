"""Durable means on disk: what a Delta commit says is flushed there before anybody is told of the commit.

Whoever commits flushes, on the host where it wrote, before it commits again and before it tells the slot, a
consistent point or the state. So of all versions only the few newest can be unfinished after a crash of the
machine. An object store needs none of this: what it has acknowledged is durable.
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
"""So many commits at most are not yet flushed at any moment: one of each process or thread that writes."""

# What a file system says that cannot flush a folder, or does not let us open it.
_NO_FOLDERS = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES, errno.EPERM)


@lru_cache(maxsize=4096)
def local_path(uri: str) -> Path | None:
    """The folder of a lake, or below one, that a file system holds; None for an object store."""
    if uri.startswith("file://"):
        return Path(unquote(uri.removeprefix("file://")))
    return None if "://" in uri else Path(uri)


def is_same_place(one: str, other: str) -> bool:
    """Return True if two names lead to one folder of this host, through links or `..`, or are the same."""
    paths = local_path(one), local_path(other)
    if paths[0] is None or paths[1] is None:
        return one == other
    return os.path.realpath(paths[0]) == os.path.realpath(paths[1])


def flush_file(path: Path) -> None:
    """Have a file's content on the disk, whoever wrote it. Raises OSError."""
    with _opened(path) as file:
        os.fsync(file)


def flush_folder(path: Path) -> None:
    """Have the names in a folder on the disk. Raises OSError."""
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
    """Have files below a folder on the disk, and the folders that lead to them from there. Raises OSError."""
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
    """Have one's own new commits on the disk, from above one version up to another, with the files they add.

    Without `with_files` these are there already. What cannot be flushed is set aside, so that nobody takes
    what the cache shows for what the disk holds, unless somebody has committed more than a marker behind it;
    then raises OSError.
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
    """Again and again: a marker may be committed meanwhile, which must not be left above a gap."""
    while versions := [version for version in commit_versions(log) if version >= first]:
        if any(_says_more(log, version) for version in versions if version > upto):
            return
        set_aside_commits(log, versions)
        if commit_file(log, versions[0]).exists():
            return


def _says_more(log: Path, version: int) -> bool:
    """Whether a commit is more than a marker, which only moves the version; also when it cannot be read."""
    try:
        return any(set(action) != {"commitInfo"} for action in read_actions(log, version))
    except (OSError, ValueError):
        return True


def flush_newest(uri: str) -> None:
    """Have on the disk what somebody may have committed, and died before it was flushed. Raises OSError."""
    root = local_path(uri)
    if root is None or not (root / LOG_FOLDER).is_dir():
        return
    log = root / LOG_FOLDER
    versions = commit_versions(log)[-NEWEST:]
    flush_files(uri, (name for name in _added(log, versions) if (root / name).exists()))
    _flush_log(log, versions)


def _flush_log(log: Path, versions: Sequence[int]) -> None:
    for version in versions:
        with suppress(FileNotFoundError):  # maintenance may have taken an old one away
            flush_file(commit_file(log, version))
        # One is written with some commits.
        with suppress(FileNotFoundError):
            flush_file(checkpoint_file(log, version))
            flush_file(log / LAST_CHECKPOINT)
    flush_folder(log)
    if 0 in versions:
        # The table is new, and so may be all folders that lead to it.
        for folder in log.parents:
            flush_folder(folder)


def flush_checkpoint(uri: str, version: int) -> None:
    """Have a checkpoint on the disk, before what it replaces is deleted. Raises OSError."""
    root = local_path(uri)
    if root is not None:
        _flush_log(root / LOG_FOLDER, [version])


def commit_file(log: Path, version: int) -> Path:
    """The file of one commit."""
    return log / f"{version:020d}.json"


def checkpoint_file(log: Path, version: int) -> Path:
    """The file of a checkpoint that is one file, as deltalake writes it."""
    return log / f"{version:020d}.checkpoint.parquet"


def commit_versions(log: Path) -> list[int]:
    """The versions whose commits lie in a log, oldest first."""
    names = (entry.name for entry in os.scandir(log) if entry.name.endswith(".json"))
    return sorted(int(name[:20]) for name in names if name[:20].isdecimal() and len(name) == 25)


def read_actions(log: Path, version: int) -> list[dict[str, dict[str, object]]]:
    """What a commit says; nothing when it is empty. Raises ValueError when it is not whole, OSError."""
    actions = [json.loads(line) for line in commit_file(log, version).read_bytes().splitlines()]
    if not all(isinstance(action, dict) for action in actions):
        raise ValueError(f"version {version} is not a commit")
    return actions


def _added(log: Path, versions: Iterable[int]) -> list[str]:
    """The files that the last of the versions has of those which they add."""
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
    """Take commits, and their checkpoints, out of a log as far as that goes.

    Newest first: whatever ends this midway, what is left has no gap.
    """
    for version in sorted(versions, reverse=True):
        set_aside(log, (checkpoint_file(log, version), commit_file(log, version)))


def set_aside(log: Path, files: Iterable[Path]) -> None:
    """They stay under other names, which no reader looks at, until maintenance takes them away."""
    for path in files:
        with suppress(OSError):
            path.rename(path.with_name(f".{path.name}.torn"))
    with suppress(OSError):
        flush_folder(log)
