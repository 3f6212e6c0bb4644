"""Lakes inside each other: who drops the outer one would take the inner one along."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import PurePosixPath

from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.storage import is_store, log_path, open_storage

_LEVELS = 4
"""Folders below a root that are looked into: a lake's tables are two below it."""


def check_not_nested(lake_root: str) -> None:
    """Raise LakeError for a root that is inside another lake, or has one inside.

    What may not be listed is not looked into: it may not be deleted either.
    """
    for outer in _outer_lakes(lake_root):
        raise LakeError(
            f"the lake {lake_root} would be inside another one: {outer} has a changelog",
            "give this pipeline a lake root outside of it. Nothing was made",
        )
    check_holds_no_lake(lake_root)


def check_holds_no_lake(lake_root: str) -> None:
    """Raise LakeError for a root that has another lake inside."""
    for inner in _inner_lakes(lake_root):
        raise LakeError(
            f"another lake is inside the lake {lake_root}: {inner} has a changelog",
            "move one of the two, so that neither is inside the other. Nothing was changed",
        )


def _outer_lakes(lake_root: str) -> Iterator[str]:
    filesystem, root = open_storage(lake_root)
    # A path may be inside by its name, or by where its links lead.
    names = {root} if is_store(filesystem) else {root, os.path.realpath(root)}
    above = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    yield from sorted(path for path in above - {"."} if _has_changelog(filesystem, path))


def _inner_lakes(lake_root: str) -> Iterator[str]:
    """Links are not followed: nothing is deleted through them."""
    filesystem, root = open_storage(lake_root)
    own = {changelog_uri(root)}
    folders = [root]
    for _ in range(_LEVELS):
        found = [inner for folder in folders for inner in _folders_in(filesystem, folder)]
        yield from (path for path in found if _has_changelog(filesystem, path))
        folders = [path for path in found if path not in own and not path.endswith("/_delta_log")]


def _folders_in(filesystem: fs.FileSystem, folder: str) -> list[str]:
    with suppress(OSError):
        infos = filesystem.get_file_info(fs.FileSelector(folder, allow_not_found=True))
        return sorted(
            info.path
            for info in infos
            if info.type == fs.FileType.Directory and (is_store(filesystem) or not os.path.islink(info.path))  # noqa: PTH114
        )
    return []


def _has_changelog(filesystem: fs.FileSystem, path: str) -> bool:
    with suppress(OSError):
        found = filesystem.get_file_info(log_path(changelog_uri(path)))
        return bool(found.type == fs.FileType.Directory)
    return False
