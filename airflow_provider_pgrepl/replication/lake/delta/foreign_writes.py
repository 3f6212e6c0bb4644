"""Whether somebody else has changed the data of a lake table. Our own commits say that they are."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import LakeChangedError
from airflow_provider_pgrepl.replication.lake.delta.commit_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions, storage_errors

log = logging.getLogger(__name__)

_NAMED = 5


@dataclass(frozen=True)
class ForeignCommit:
    """A commit of another program that changed data."""

    version: int
    operation: str


@dataclass(frozen=True)
class Writers:
    """What the log says of who changed a table's data, as far back as it goes.

    `foreign`: commits of another program since the last snapshot, which replaced everything; newest first.
    `is_complete`: the log reaches back to that snapshot, or to the first commit.
    """

    foreign: tuple[ForeignCommit, ...] = ()
    is_complete: bool = True

    @property
    def versions(self) -> str:
        """The versions that another program made, in words."""
        versions = [str(commit.version) for commit in reversed(self.foreign)]
        named = ", ".join(versions[:_NAMED])
        return named if len(versions) <= _NAMED else f"{named} and {len(versions) - _NAMED} more"


def check_writers(table: DeltaTable, name: TableName, since: int | None) -> None:
    """Raise LakeChangedError when a commit after the version `since` (None: any) is not ours."""
    uri, newest = table.table_uri, int(table.version())
    if not (found := read_writers(uri, newest, since).foreign):
        return
    writers = read_writers(uri, newest)
    raise LakeChangedError(
        f"{name}: version {found[0].version} of the lake table was written by somebody else"
        f" ({found[0].operation})",
        f"stop every other writer of this lake. To keep the rows that it wrote (versions {writers.versions}),"
        f" copy the table out of the lake. A new copy replaces them, and version {newest} can be read until"
        f" maintenance deletes its files. Then {hints.resnapshot(name)}",
    )


def warn_of_foreign_rows(table: DeltaTable) -> None:
    """Log the versions of another program that a snapshot is about to replace."""
    newest = int(table.version())
    if (writers := read_writers(table.table_uri, newest)).foreign:
        log.warning(
            "%s: the snapshot replaces rows that another program wrote (versions %s). Version %d can be read"
            " until maintenance deletes its files",
            *(table.table_uri, writers.versions, newest),
        )


def read_writers(uri: str, newest: int, since: int | None = None) -> Writers:
    """Return who changed the data of a table after the version `since` (None: any).

    Looks back no further than to the last snapshot, and to where maintenance took the log.
    """
    foreign: list[ForeignCommit] = []
    for version in range(newest, -1 if since is None else since, -1):
        actions = _read(uri, version)
        if actions is None:
            return Writers(tuple(foreign), is_complete=False)
        if is_snapshot(actions):
            break
        if (found := foreign_commit(version, actions)) is not None:
            foreign.append(found)
    return Writers(tuple(foreign))


def foreign_commit(version: int, actions: Sequence[dict[str, Any]]) -> ForeignCommit | None:
    """Return a commit of another program that changed data; None for any other.

    Commits that change no data (compaction, vacuum, properties) may be anybody's.
    """
    about = _info(actions)
    if _kind(about) is None and any(map(_changes_data, actions)):
        return ForeignCommit(version, str(about.get("operation", "unknown operation")))
    return None


def is_snapshot(actions: Sequence[dict[str, Any]]) -> bool:
    """Return True for the commit of a snapshot of ours, which replaces all rows."""
    return _kind(_info(actions)) == "snapshot"


def _info(actions: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return next((action["commitInfo"] for action in actions if "commitInfo" in action), {})


def _read(uri: str, version: int) -> list[dict[str, Any]] | None:
    """A commit's actions; None when its log file is gone."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        try:
            return read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return None


def _kind(info: dict[str, Any]) -> str | None:
    """What our own metadata of a commit says it is; None for somebody else's."""
    about = info.get(COMMIT_METADATA)
    if not isinstance(about, str):
        return None
    try:
        return str(json.loads(about)["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def _changes_data(action: dict[str, Any]) -> bool:
    return any(action[kind].get("dataChange", True) for kind in ("add", "remove") if kind in action)
