"""Whether somebody else has changed the data of a lake table. Our own commits say that they are."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import LakeChangedError
from airflow_provider_pgrepl.replication.lake.delta.commit_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions, storage_errors


@dataclass(frozen=True)
class ForeignCommit:
    """A commit of another program that changed data."""

    version: int
    operation: str


def check_writers(table: DeltaTable, name: TableName, since: int | None) -> None:
    """Raise LakeChangedError when a commit after the version `since` (None: any) is not ours."""
    found = foreign_commit(table.table_uri, int(table.version()), since)
    if found is not None:
        raise LakeChangedError(
            f"{name}: version {found.version} of the lake table was written by somebody else"
            f" ({found.operation})",
            f"see to it that nothing else writes below the lake root, then {hints.resnapshot(name)}",
        )


def foreign_commit(uri: str, newest: int, since: int | None) -> ForeignCommit | None:
    """Return the newest commit after the version `since` (None: any) that another program made.

    Looks back no further than to the last snapshot, which replaced everything, and to where maintenance took
    the log. Commits that change no data (compaction, vacuum, properties) may be anybody's.
    """
    for version in range(newest, -1 if since is None else since, -1):
        actions = _read(uri, version)
        if actions is None:
            return None
        about: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
        kind = _kind(about.get(COMMIT_METADATA))
        if kind == "snapshot":
            return None
        if kind is None and any(map(_changes_data, actions)):
            return ForeignCommit(version, str(about.get("operation", "unknown operation")))
    return None


def _read(uri: str, version: int) -> list[dict[str, Any]] | None:
    """A commit's actions; None when its log file is gone."""
    filesystem, root = open_storage(uri)
    with storage_errors(uri):
        try:
            return read_commit_actions(filesystem, root, version)
        except FileNotFoundError:
            return None


def _kind(about: object) -> str | None:
    """What our own metadata of a commit says it is; None for somebody else's."""
    if not isinstance(about, str):
        return None
    try:
        return str(json.loads(about)["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def _changes_data(action: dict[str, Any]) -> bool:
    return any(action[kind].get("dataChange", True) for kind in ("add", "remove") if kind in action)
