"""Where in the changelog a moment of the source's clock lies."""

from __future__ import annotations

from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import ChangelogFileGoneError
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import open_storage, read_parquet

_TIME = pa.timestamp("us", "UTC")


def first_commit_after(table: DeltaTable, epoch: Epoch, moment: datetime) -> LSN | None:
    """The first commit, in LSN order, of those that committed later than `moment` by the source's clock.

    None when the open changelog holds none of the epoch. Commit times need not grow with the LSN: all that
    stands before the result committed at or before `moment`. Files that their statistics rule out are not
    read, and of the others two columns. Raises ChangelogError when a file is gone.
    """
    files = pa.table(table.get_add_actions(flatten=True))
    if files.num_rows == 0:
        return None
    files = files.filter(pc.equal(files["min.epoch"], int(epoch))).sort_by("min.commit_lsn")
    if "max.commit_ts" in files.column_names:
        # Bounds are rounded outwards; a file without any may hold anything.
        later = pc.greater(files["max.commit_ts"].cast(_TIME), pa.scalar(moment, _TIME))
        files = files.filter(pc.fill_null(later, True))
    filesystem, root = open_storage(table.table_uri)
    first: int | None = None
    for path, lowest in zip(files["path"].to_pylist(), files["min.commit_lsn"].to_pylist(), strict=True):
        if first is not None and lowest > first:
            break
        found = _first_in_file(filesystem, f"{root.rstrip('/')}/{path}", moment)
        if found is not None:
            first = found if first is None else min(first, found)
    return None if first is None else LSN(first)


def _first_in_file(filesystem: pafs.FileSystem, path: str, moment: datetime) -> int | None:
    columns = ["commit_lsn", "commit_ts"]
    try:
        rows = read_parquet(filesystem, path, columns)
    except FileNotFoundError:
        raise ChangelogFileGoneError(
            "a changelog file is gone", "read again: an hour was just joined or dropped"
        ) from None
    later = rows.filter(pc.greater(rows["commit_ts"], pa.scalar(moment, _TIME)))
    found: int | None = pc.min(later["commit_lsn"]).as_py()
    return found
