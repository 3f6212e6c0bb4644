"""A record of the lake's own tables in its changelog, so that a missing table is not silently recreated.

The changelog holds a mark for each table, derived from the table's ID, as the version of a Delta app ID. A
table without a mark is new, or was created by an earlier version of this package. The mark 0 stands for a
table whose loss was accepted.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import PurePosixPath

from deltalake.exceptions import DeltaError, TableNotFoundError
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError, NoChangelogError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import (
    is_storage_error,
    is_store,
    log_path,
    open_storage,
    storage_error,
)
from airflow_provider_pgrepl.replication.storage.probe import doubt_of_absence

from . import writer
from .layout import POINTS, RELATIONS, changelog_uri, own_table_uri
from .reader import AppTransactions, open_changelog

log = logging.getLogger(__name__)

_TITLES = {POINTS: "the table of consistent points", RELATIONS: "the index of relations"}
_PUBLISHERS = "publishers/"
_ACCEPT = "pgrepl accept-missing FILE.json"
_ATTEMPTS = 3
_GIVEN_UP = 0
_LEVELS = 4
"""Levels of folders below a root that are searched: a lake's tables are two levels below it."""


def own_table_app(name: str) -> str:
    """Return the Delta app ID whose version is the mark of an own table."""
    return f"pgrepl-table:{name}"


@dataclass(frozen=True)
class MissingTable:
    """A recorded table of the lake that is missing (`found` is 0) or was replaced by another table."""

    uri: str
    name: str
    found: int

    @property
    def reason(self) -> str:
        """The reason, as a sentence without its period."""
        title = _TITLES[self.name]
        if self.found:
            return f"{title} in {self.uri} is not that of this lake: another table has taken its place"
        doubt = doubt_of_absence(self.uri)
        return f"{title} of this lake is not in {self.uri}{f': {doubt}' if doubt else ''}"

    def error(self) -> LakeError:
        back = "bring the folder back (mount it, or give the permission to read it)"
        if self.found:
            back = "move that folder away first, then bring back the one of this lake"
        return LakeError(
            f"{self.reason}. Nothing was changed",
            f"{back}, and start again. Only if it is lost for good, give it up: {_ACCEPT} prints what is"
            " lost, and with --yes gives it up. Maintenance then deletes the files of earlier points",
        )


def unreadable(uri: str, name: str, error: BaseException) -> LakeError:
    """Return the error of an own table that cannot be opened.

    It is a LakeUnavailableError for a storage error, else the error of a damaged log, which no retry fixes.
    """
    if is_storage_error(error):
        return storage_error(f"{uri} cannot be opened", error)
    return damaged(uri, name, "its log is not whole")


def damaged(uri: str, name: str, reason: str) -> LakeError:
    """Return the error of an own table whose files are damaged or missing. `reason`: a clause."""
    publisher = name.removeprefix(_PUBLISHERS)
    title, without = f"the table of publisher {publisher}", _publish_after(publisher)
    if name in _TITLES:
        title, without = _TITLES[name], f"{_ACCEPT} prints what is lost, and with --yes gives it up"
    return LakeError(
        f"{title} in {uri} cannot be read: {reason}. Nothing was changed",
        "check that the storage shows all files of the lake, or restore the whole folder from a copy of this"
        " lake, and start again. Only if it is lost for good, move the folder away (do not delete it), then"
        f" give it up: {without}",
    )


def find_missing(lake_root: str, known: Collection[str] = ()) -> list[MissingTable]:
    """Return the recorded tables of the lake that are missing or were replaced.

    `known`: names of tables that must exist by other evidence. They are checked only if the lake has no
    mark at all, because an earlier version created it. Raises LakeError, LakeUnavailableError.
    """
    try:
        changelog = open_changelog(changelog_uri(lake_root))
    except NoChangelogError:
        return []
    return list(_missing(changelog, lake_root, known))


def _missing(changelog: AppTransactions, lake_root: str, known: Collection[str]) -> Iterator[MissingTable]:
    marks = {name: changelog.transaction_version(own_table_app(name)) for name in _TITLES}
    is_marked = any(mark is not None for mark in marks.values())
    for name, mark in marks.items():
        uri = own_table_uri(lake_root, name)
        if mark == _GIVEN_UP or (mark is None and (is_marked or name not in known)):
            continue
        found = _read_mark(uri, name)
        if not found or (mark is not None and found != mark):
            yield MissingTable(uri, name, found)


def find_lost(lake_root: str, known: Collection[str] = ()) -> list[MissingTable]:
    """Return the missing tables, whose loss can be accepted. `known` as in `find_missing`.

    Raises LakeError if another table has replaced one: its content does not describe this lake.
    """
    return list(map(_without_table, find_missing(lake_root, known)))


def _without_table(missing: MissingTable) -> MissingTable:
    if missing.found:
        raise missing.error()
    return missing


def check(lake_root: str, known: Collection[str] = (), names: Collection[str] = tuple(_TITLES)) -> None:
    """Raise LakeError if a recorded table with one of `names` is missing or was replaced.

    `known` as in `find_missing`.
    """
    for missing in find_missing(lake_root, known):
        if missing.name in names:
            raise missing.error()


def record(lake_root: str) -> None:
    """Mark the existing tables that have no mark. Raises ChangelogError, LakeUnavailableError."""
    _record(lake_root)


def give_up(lake_root: str, missing: Collection[MissingTable]) -> None:
    """Record that the loss of these tables is accepted, and mark the existing tables.

    Raises ChangelogError, and LakeError, also if another table has replaced one of `missing`.
    """
    _record(lake_root, frozenset(own_table_app(_without_table(one).name) for one in missing))


def check_publisher(lake_root: str, name: str) -> None:
    """Raise LakeError if the table with a publisher's position is missing or was replaced by another table.

    Raises LakeUnavailableError for a storage error. Does nothing without a changelog or without a mark.
    """
    try:
        changelog = open_changelog(changelog_uri(lake_root))
    except NoChangelogError:
        return
    table = publisher_table(name)
    mark, uri = changelog.transaction_version(own_table_app(table)), own_table_uri(lake_root, table)
    if not mark or (found := _read_mark(uri, table)) == mark:
        return
    doubt = doubt_of_absence(uri)
    reason = "another table has taken its place" if found else doubt
    raise LakeError(
        f"the table of publisher {name} is not in {uri}{f': {reason}' if reason else ''}. Without it,"
        " the published position is unknown. Nothing was changed",
        "mount the folder, or give this process the right to read it. If it is lost, publish again after an"
        f" LSN that all consumers have: {_publish_after(name)}. An earlier LSN sends events twice, a later"
        " one loses events",
    )


def record_publisher(lake_root: str, name: str) -> None:
    """Mark the table of a publisher, also if it replaces a marked one.

    If the changelog is unavailable, only a warning is logged. Raises ChangelogError, and LakeError if the
    publisher's table cannot be read.
    """
    table = publisher_table(name)
    app, mark = own_table_app(table), _read_mark(own_table_uri(lake_root, table), table)
    try:
        _commit(
            lake_root, lambda changelog: {app: mark} if changelog.transaction_version(app) != mark else {}
        )
    except NoChangelogError:
        return
    except LakeUnavailableError as error:
        log.warning("publisher %s is not marked in the changelog: %s", name, error.message)


def _publish_after(name: str) -> str:
    return f"pgrepl publish FILE.json --publisher {name} --after LSN"


def publisher_table(name: str) -> str:
    """Return the own-table name of a publisher's table."""
    return f"{_PUBLISHERS}{name}"


def _record(lake_root: str, given_up: Collection[str] = ()) -> None:
    def wanted(changelog: AppTransactions) -> dict[str, int]:
        marks = {app: _GIVEN_UP for app in given_up if changelog.transaction_version(app) != _GIVEN_UP}
        for name in _TITLES:
            app = own_table_app(name)
            if app not in given_up and not changelog.transaction_version(app):
                marks |= {app: mark} if (mark := _read_mark(own_table_uri(lake_root, name), name)) else {}
        return marks

    _commit(lake_root, wanted)


def _commit(lake_root: str, wanted: Callable[[AppTransactions], dict[str, int]]) -> None:
    uri = changelog_uri(lake_root)
    for _ in range(_ATTEMPTS):
        if not (marks := wanted(open_changelog(uri))):
            return
        # A receiver may commit at the same time. Then nothing is marked, and the next attempt checks again.
        writer.mark(uri, marks)
    log.warning(
        "the changelog was written to all the time: its marks of the lake's tables are recorded later"
    )


def _read_mark(uri: str, name: str) -> int:
    """Return the mark of the table at `uri`, or 0 if there is none. Raises LakeError."""
    try:
        table_id = str(open_delta(uri).metadata().id)
    except TableNotFoundError:
        return 0
    except (DeltaError, OSError) as error:
        raise unreadable(uri, name, error) from None
    digest = hashlib.blake2b(table_id.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 1) or 1


def check_not_nested(lake_root: str) -> None:
    """Raise LakeError if a lake root is inside another lake, or contains one.

    Folders that this process may not list are skipped: it may not delete them either.
    """
    for outer in _outer_lakes(lake_root):
        raise LakeError(
            f"the lake {lake_root} would be inside another one: {outer} has a changelog",
            "give this pipeline a lake root outside of it. Nothing was made",
        )
    check_holds_no_lake(lake_root)


def check_holds_no_lake(lake_root: str) -> None:
    """Raise LakeError if a lake root contains another lake."""
    for inner in _inner_lakes(lake_root):
        raise LakeError(
            f"another lake is inside the lake {lake_root}: {inner} has a changelog",
            "move one of the two, so that neither is inside the other. Nothing was changed",
        )


def _outer_lakes(lake_root: str) -> Iterator[str]:
    filesystem, root = open_storage(lake_root)
    # Check the path as it is written, and with its symbolic links resolved.
    names = {root} if is_store(filesystem) else {root, os.path.realpath(root)}
    above = {str(parent) for name in names for parent in PurePosixPath(name).parents}
    yield from sorted(path for path in above - {"."} if _has_changelog(filesystem, path))


def _inner_lakes(lake_root: str) -> Iterator[str]:
    """Yield the lakes inside a lake root. Does not follow symbolic links: nothing is deleted through them."""
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
