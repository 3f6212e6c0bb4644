"""Open lake tables of this worker process: opening one anew reads its whole log."""

from __future__ import annotations

from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.lake.table import open_table
from airflow_provider_pgrepl.replication.storage import open_storage

_handles: dict[str, tuple[DeltaTable, tuple[int | None, int | None]]] = {}
"""With what tells each apart from a later one in its place."""


def open_newest(uri: str) -> tuple[DeltaTable, int | None]:
    """The table's newest version, and the one at which this process left it; None when it had not opened it.

    One that was moved away, and made again, is not taken for the same. Raises LakeTableError.
    """
    beginning = _beginning(uri)
    table, began = _handles.get(uri, (None, None))
    if table is None or began != beginning:
        table = open_table(uri)
        _handles[uri] = table, beginning
        return table, None
    left = int(table.version())
    table.update_incremental()
    return table, left


def forget(uri: str) -> None:
    """After an error a handle may not stand where the next work expects it."""
    _handles.pop(uri, None)


def _beginning(uri: str) -> tuple[int | None, int | None]:
    """When the table's first commit was written, and its size; Nones once upkeep has taken it away."""
    filesystem, root = open_storage(uri)
    first = filesystem.get_file_info(f"{root}/_delta_log/{0:020}.json")
    return first.mtime_ns, first.size
