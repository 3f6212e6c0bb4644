"""Open lake tables of this worker process: opening one anew reads its whole log."""

from __future__ import annotations

from functools import partial

from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from airflow_provider_pgrepl.errors import LakeTableError
from airflow_provider_pgrepl.replication.lake.delta.commit_files import commit_fingerprint, settle_log
from airflow_provider_pgrepl.replication.lake.delta.live_files import check_files
from airflow_provider_pgrepl.replication.lake.delta.table import open_table, pipeline_of
from airflow_provider_pgrepl.replication.storage import (
    has_commit,
    open_storage,
    raise_if_away,
    requests_at_once,
)

_handles: dict[str, tuple[DeltaTable, str]] = {}
"""With the fingerprint of the commit at which this process left each."""


def open_newest(uri: str, app: str, told: int | None = None) -> tuple[DeltaTable, int | None]:
    """The table's newest version, and the one at which this process left it; None when it had not opened it,
    or it is not the same table any more: made anew, put back, or without its newest commits.

    `app`: under which this pipeline writes it; `told` as in `find_torn`. Raises LakeTableError.
    """
    table, fingerprint = _handles.get(uri, (None, ""))
    if table is not None and fingerprint and fingerprint == commit_fingerprint(uri, int(table.version())):
        left = int(table.version())
        _refresh(table)
        # What others have committed since may have been emptied before it was read.
        since = range(left + 1, int(table.version()) + 1)
        with requests_at_once(open_storage(uri)[0], len(since)) as each:
            if all(each(partial(commit_fingerprint, uri), since)):
                return table, left
    settle_log(uri, pipeline_of(app), told)
    table = open_table(uri)
    check_files(table)
    leave(table, uri)
    return table, None


def leave(table: DeltaTable, uri: str) -> str:
    """Remember the table for the next work, as it is now; the fingerprint of its newest commit."""
    fingerprint = commit_fingerprint(uri, int(table.version()))
    _handles[uri] = table, fingerprint
    return fingerprint


def forget(uri: str) -> None:
    """After an error a handle may not stand where the next work expects it."""
    _handles.pop(uri, None)


def _refresh(table: DeltaTable) -> None:
    try:
        # Seldom is there another, and looking for it is cheaper than asking deltalake to.
        if has_commit(table.table_uri, int(table.version()) + 1):
            table.update_incremental()
    except (DeltaError, OSError) as error:
        raise_if_away(f"the lake table at {table.table_uri} cannot be opened", error)
        name = type(error).__name__
        raise LakeTableError(f"cannot open the lake table at {table.table_uri}: {name}") from error
