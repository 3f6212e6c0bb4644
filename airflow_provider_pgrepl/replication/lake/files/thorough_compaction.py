"""Compacting one table as far as it goes, beside whoever writes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError
from airflow_provider_pgrepl.replication.lake.delta.live_files import live_files
from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.lake.files.compaction import compact, is_compactable

_AT_LEAST = 2
_ANY_SHARE = 0.0
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5


@dataclass(frozen=True)
class FilesOf:
    """How many data files a table has, of how many bytes, and in how many of them rows are marked as gone."""

    files: int
    bytes: int
    marked: int

    @classmethod
    def table(cls, table: DeltaTable) -> FilesOf:
        """Of an open one. Raises LakeTableError, LakeUnavailableError."""
        found = live_files(table).values()
        return cls(
            len(found), sum(file.size for file in found), sum(file.vector is not None for file in found)
        )


@dataclass(frozen=True)
class Compaction:
    """What became of a table. `is_busy`: its writer was faster each time; `is_left`: it was time to end."""

    before: FilesOf
    after: FilesOf
    is_busy: bool = False
    is_left: bool = False


def compact_thoroughly(
    uri: str,
    app: str,
    cluster_by: Sequence[str],
    is_time_to_end: Callable[[], bool],
    wait: Callable[[float], object],
) -> Compaction:
    """Join all small files of a table, and write those again of which rows are marked as gone; one commit
    after the other, as long as files are left that were there at the beginning. `cluster_by` is that of
    `compact`.

    `is_time_to_end` is asked before each, `wait` called, with seconds, when the table's writer has committed
    meanwhile. Raises LakeTableError, LakeUnavailableError; FencedError when the epoch is over.
    """
    table = open_table(uri)
    before, began = FilesOf.table(table), set(live_files(table))
    refused, is_left = 0, False
    while is_compactable(table, app, at_least=_AT_LEAST, gone_share=_ANY_SHARE, row_bytes=0, among=began):
        is_left = is_time_to_end()
        if is_left or refused == _ATTEMPTS:
            break
        if _is_compacted(table, app, cluster_by, began):
            refused = 0
        else:
            wait(_FIRST_WAIT_S * 2**refused)
            refused += 1
        # Anew each time: the writer's commits since are not to be refused, nor forgotten.
        table = open_table(uri)
    return Compaction(before, FilesOf.table(table), refused == _ATTEMPTS, is_left)


def _is_compacted(table: DeltaTable, app: str, cluster_by: Sequence[str], among: Collection[str]) -> bool:
    """Whether the table's writer was not faster."""
    try:
        gone = compact(
            table,
            app,
            cluster_by,
            at_least=_AT_LEAST,
            gone_share=_ANY_SHARE,
            row_bytes=0,
            among=among,
        )
        return gone > 0
    except FencedError:
        return False
