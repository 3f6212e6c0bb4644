"""Small files of a lake table into larger ones."""

from __future__ import annotations

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.replication.config import MIB
from airflow_provider_pgrepl.replication.lake.delta.fenced_commits import bounded_columns, fenced
from airflow_provider_pgrepl.replication.lake.delta.statistics import writer_properties
from airflow_provider_pgrepl.replication.lake.delta.table import read_position

_SMALL_FILE = 16 * MIB
_MANY_SMALL_FILES = 32


def compact_small_files(
    table: DeltaTable,
    app: str,
    *,
    small_bytes: int = _SMALL_FILE,
    at_least: int = _MANY_SMALL_FILES,
) -> int:
    """Join small files into larger ones once there are `at_least` of them; how many files that took away.

    Changes no row and not the position (`dataChange` is false). Delta lets a compaction carry no app id;
    it is safe without: files that another process has replaced meanwhile cannot be replaced again.
    Raises FencedError then, and when the epoch is over.
    """
    position = read_position(table, app)
    sizes = pa.table(table.get_add_actions()).column("size_bytes").to_numpy()
    if position is None or int((sizes < small_bytes).sum()) < at_least:
        return 0
    bounded = bounded_columns(table, app)
    writer = writer_properties(bounded, compression="ZSTD", compression_level=1)
    metrics = fenced(
        table,
        app,
        position,
        lambda: table.optimize.compact(target_size=8 * small_bytes, writer_properties=writer),
    )
    return int(metrics["numFilesRemoved"])
