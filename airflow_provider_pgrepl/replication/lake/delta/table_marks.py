"""Marks of a lake table: the app ids in its log by which it says where it is, and of which lake.

A copy of its folder has them as well, at another path or in another lake. They are app ids because a
checkpoint keeps these.
"""

from __future__ import annotations

from collections.abc import Collection

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import LAKE_APP, changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import lake_id, open_changelog
from airflow_provider_pgrepl.replication.storage.durable import local_path

PATH_APP = "pgrepl-path:"
"""Begins a Delta app id that goes on with the table's path below the lake root."""


def path_mark(uri: str) -> str:
    """Return the app id that says where a lake table, or history, is below the root of its lake."""
    return f"{PATH_APP}{_split(uri)[1]}"


def table_marks(uri: str) -> dict[str, int]:
    """Return the marks of the table at `uri`, for a commit. Without a changelog there is no mark of a lake.

    Raises LakeUnavailableError.
    """
    lake = lake_mark(_split(uri)[0])
    return {path_mark(uri): 1} | ({} if lake is None else {lake: 1})


def lake_mark(lake_root: str) -> str | None:
    """Return the app id that says of which lake a table is; None without a changelog. Raises
    LakeUnavailableError."""
    try:
        return f"{LAKE_APP}{lake_id(open_changelog(changelog_uri(lake_root)))}"
    except ChangelogError:
        return None


def copied_from(uri: str, apps: Collection[str]) -> str | None:
    """Return the path of the table of whose folder this one is a copy, by the app ids of its log."""
    paths = [app for app in apps if app.startswith(PATH_APP)]
    return paths[0].removeprefix(PATH_APP) if paths and path_mark(uri) not in paths else None


def reason_of_lake(uri: str, apps: Collection[str]) -> str | None:
    """Return why a table with these app ids may not be of the lake that it lies in; None if it is, or has no
    mark of a lake. Raises LakeUnavailableError.
    """
    lakes = {app for app in apps if app.startswith(LAKE_APP)}
    if not lakes:
        return None
    try:
        changelog = open_changelog(changelog_uri(_split(uri)[0]))
    except ChangelogError:
        return "it is of a lake whose changelog is not there"
    own = f"{LAKE_APP}{lake_id(changelog)}"
    # A changelog that took the place of a lost one has the mark of that.
    if own in lakes or any(changelog.transaction_version(lake) is not None for lake in lakes):
        return None
    return f"it is of another lake, {min(lakes).removeprefix(LAKE_APP)}"


def _split(uri: str) -> tuple[str, str]:
    """The lake root, and the path below it, of a table."""
    local = local_path(uri)
    root, *path = (uri.rstrip("/") if local is None else str(local)).rsplit("/", 2)
    return root, "/".join(path)
