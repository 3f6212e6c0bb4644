"""Whether somebody else has changed the data of a lake table. Our own commits say that they are."""

from __future__ import annotations

import json
from typing import Any

from deltalake import DeltaTable

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import LakeChangedError
from airflow_provider_pgrepl.replication.lake.delta.commit_files import COMMIT_METADATA
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.storage import open_storage, read_commit_actions, storage_errors


def check_writers(table: DeltaTable, name: TableName, since: int | None) -> None:
    """Raises LakeChangedError when a commit after the version `since` (None: any) is not ours.

    Looks back no further than to the last snapshot, which replaced everything, and to where maintenance took
    the log. Commits that change no data (compaction, vacuum, properties) may be anybody's.
    """
    newest = int(table.version())
    for version in range(newest, -1 if since is None else since, -1):
        actions = _read(table.table_uri, version)
        if actions is None:
            return
        about: dict[str, Any] = next((a["commitInfo"] for a in actions if "commitInfo" in a), {})
        kind = _kind(about.get(COMMIT_METADATA))
        if kind == "snapshot":
            return
        if kind is None and any(map(_changes_data, actions)):
            raise LakeChangedError(
                f"{name}: version {version} of the lake table was written by somebody else"
                f" ({about.get('operation', 'unknown operation')})",
                f"see to it that nothing else writes below the lake root, then {hints.resnapshot(name)}",
            )


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
