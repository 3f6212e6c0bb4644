"""Compaction of a lake table: rewrites small files, and files of which many rows are deleted, as fewer files.

The bytes written for a change must not grow with the table. So files are compacted by tiers: ten files of a
small size become one of the next size, and each row is written at most once for each tier.

A file whose rows are deleted one by one is rewritten when a quarter of them is deleted, which writes at most
three rows for each deleted one. It is rewritten earlier once its vectors, each of which lists all deleted
rows, have taken as many bytes as the file.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import FencedError, OvertakenError
from airflow_provider_pgrepl.replication.delta.log import added_action, can_commit
from airflow_provider_pgrepl.replication.lake.delta.commit import (
    VersionTakenError,
    bounded,
    check_version,
    commit_actions,
    commit_properties,
    fenced,
    narrow_bounds,
    removed,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile, app_version, live_files
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile, files_beside
from airflow_provider_pgrepl.replication.lake.delta.table import FENCED_HINT, open_table, read_position
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.sections import MIB
from airflow_provider_pgrepl.replication.storage import durable, storage_errors

from .merge_on_read import has_vectors, without_vectors
from .row_search import FileRows

_RUN_BYTES = 128 << 20
"""Uncompressed bytes of rows that are sorted together. More bytes take more memory."""
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 64 << 10
_TIERS = (4 << 10, 32 << 10, 256 << 10, 2 * MIB, 16 * MIB)
"""Upper limits of the tiers of small files, in bytes. Files from the last limit on are not small."""
ROW_BYTES = 32
"""Least bytes that a row counts while changes are being applied: rows that compress well are as much work."""
_PURGED_SHARE = 0.25
_AT_ONCE_BYTES = 32 * MIB
"""Bytes of files that are compacted, and purged, in one commit: the table's next changes wait for it."""
_AT_LEAST = 2
_ANY_SHARE = 0.0
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5


def clustered(parts: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of all parts in small batches, sorted by `columns` within runs of about _RUN_BYTES.

    Columns that the rows do not have, and nested ones, are not used. Without any other, rows are not sorted.
    """
    run: list[pa.Table] = []
    size = 0
    for part in parts:
        run.append(part)
        size += part.nbytes
        if size >= _RUN_BYTES:
            yield from _ordered(run, columns)
            run, size = [], 0
    if run:
        yield from _ordered(run, columns)


def _ordered(run: Sequence[pa.Table], columns: Sequence[str]) -> list[pa.RecordBatch]:
    rows = pa.concat_tables(run)
    most = max(1, min(_BATCH_ROWS, _BATCH_BYTES * len(rows) // max(rows.nbytes, 1)))
    names = [
        name
        for name in columns
        if name in rows.schema.names and not pa.types.is_nested(rows.schema.field(name).type)
    ]
    if names:
        rows = rows.sort_by([(name, "ascending") for name in names])
    return list(rows.to_batches(max_chunksize=most))


@dataclass(frozen=True)
class FileSize:
    """The properties of a file that decide about its compaction.

    `bytes`: its size. `gone`: the share of its rows that are deleted. `partition`: the partition of its rows.
    `vectors`: the bytes written for its deletion vectors.
    """

    bytes: int
    gone: float
    partition: str | None = None
    vectors: int = 0

    @property
    def costs_itself(self) -> bool:
        return self.vectors >= self.live_bytes > 0

    @property
    def live_bytes(self) -> int:
        return int(self.bytes * (1 - self.gone))

    @property
    def gone_bytes(self) -> int:
        return self.bytes - self.live_bytes


def compact(
    table: DeltaTable,
    app: str,
    cluster_by: Sequence[str] = (),
    *,
    at_least: int = 10,
    gone_share: float = _PURGED_SHARE,
    row_bytes: int = ROW_BYTES,
    among: Collection[str] | None = None,
) -> int:
    """Compact small files, rewrite files with many deleted rows, and return the number of replaced files.

    Changes no row and not the position (`dataChange` is false). If another process commits first, does
    nothing and returns 0. Also does nothing if the table requires more of writers than this package supports.

    :param cluster_by: columns by which the rows are sorted, if the table has them
    :param at_least: the number of files of a tier from which on they are compacted
    :param gone_share: the share of deleted rows from which on a file is rewritten
    :param row_bytes: the least bytes that a row counts in the size of a file
    :param among: the paths of the files to choose from; None: all files
    :raises FencedError: if another writer of this pipeline, or of a later epoch, has committed
    :raises LakeTableError: if the table cannot be read or written; also LakeUnavailableError
    """
    position = read_position(table, app)
    if position is None or not can_commit(table):
        return 0
    rows = FileRows(table)
    chosen = _chosen(rows, at_least, gone_share, row_bytes, among)
    if not chosen:
        return 0
    return len(chosen) if _rewrite(table, app, position, rows, chosen, cluster_by) else 0


def is_compactable(
    table: DeltaTable, app: str, *, at_least: int, gone_share: float, row_bytes: int, among: Collection[str]
) -> bool:
    """Return True if `compact` would rewrite any file.

    Raises FencedError if a later epoch has written the table, LakeTableError, LakeUnavailableError.
    """
    if read_position(table, app) is None or not can_commit(table):
        return False
    return bool(_chosen(FileRows(table), at_least, gone_share, row_bytes, among))


def _chosen(
    rows: FileRows, at_least: int, gone_share: float, row_bytes: int, among: Collection[str] | None
) -> list[int]:
    sizes = _sizes(rows, row_bytes)
    numbers = [number for number, file in enumerate(rows.files) if among is None or file.path in among]
    chosen = files_to_compact([sizes[number] for number in numbers], at_least, gone_share)
    return [numbers[place] for place in chosen]


def withdraw_vectors(table: DeltaTable, app: str) -> bool:
    """Rewrite all files with deletion vectors, and remove deletion vectors from the table's protocol.

    Readers without support for deletion vectors can then read the newest version, but not older ones. Returns
    True if that was done. Returns False if the table does not allow vectors, requires more of writers than
    this package supports, or if another process commits first. Raises what `compact` does.
    """
    position = read_position(table, app)
    if position is None or not can_commit(table) or not has_vectors(table):
        return False
    rows = FileRows(table)
    marked = [number for number, file in enumerate(rows.files) if file.vector is not None]
    if not _rewrite(table, app, position, rows, marked, more=lambda: without_vectors(table)):
        return False
    # Readers of the newest version start at this checkpoint, and find no vector at all.
    table.create_checkpoint()
    with storage_errors(table.table_uri):
        durable.flush_checkpoint(table.table_uri, int(table.version()))
    return True


def _rewrite(
    table: DeltaTable,
    app: str,
    position: LSN,
    rows: FileRows,
    chosen: Collection[int],
    cluster_by: Sequence[str] = (),
    more: Callable[[], list[dict[str, Any]]] = list,
) -> bool:
    """Rewrite these files in one commit with `more` actions. Return False if another commit came first."""
    written = _write(rows, chosen, cluster_by)
    try:
        narrow_bounds(table, app, bounded(written, rows.schema))
        check_version(table, rows.version)
    except (OvertakenError, FencedError, VersionTakenError):
        return _is_left_to_another(table, app, position)
    actions = [
        *more(),
        *(removed(rows.files[number], changes_data=False) for number in chosen),
        *(added_action(file.add_action(changes_data=False)) for file in written),
    ]
    properties = commit_properties(app, position, "compaction")
    commit = partial(commit_actions, table, "OPTIMIZE", properties, actions)
    try:
        fenced(table, app, position, commit, passing=(VersionTakenError,))
    except (OvertakenError, VersionTakenError):
        return _is_left_to_another(table, app, position)
    return True


def _is_left_to_another(table: DeltaTable, app: str, position: LSN) -> bool:
    """Return False if the commits that came first left the position unchanged; else raise FencedError."""
    table.update_incremental()
    if app_version(table, app) == position:
        return False
    raise FencedError(f"{table.table_uri}: another process has written this table", FENCED_HINT)


def files_to_compact(sizes: Sequence[FileSize], at_least: int, gone_share: float) -> list[int]:
    """Return the numbers of the files to rewrite, ascending."""
    chosen = {number for number, size in enumerate(sizes) if size.gone == 1}
    total = 0
    for partition in _by_partition(range(len(sizes)), [size.partition for size in sizes]):
        joined = _joined(sizes, partition, at_least) if total < _AT_ONCE_BYTES else set()
        total += sum(sizes[number].live_bytes for number in joined)
        chosen |= joined
    return sorted(chosen | _purged(sizes, chosen, gone_share))


def _joined(sizes: Sequence[FileSize], numbers: Sequence[int], at_least: int) -> set[int]:
    """Return the files to compact: those of each tier that has `at_least` files, and all smaller ones.

    Takes the smallest first, up to _AT_ONCE_BYTES, but at least two.
    """
    joined: set[int] = set()
    lower = 0
    for upper in _TIERS:
        tier = [number for number in numbers if lower <= sizes[number].live_bytes < upper]
        if len(tier) >= at_least:
            joined |= {number for number in numbers if sizes[number].live_bytes < upper}
        lower = upper
    first, total = set[int](), 0
    for number in sorted(joined, key=lambda number: sizes[number].live_bytes):
        total += sizes[number].live_bytes
        if len(first) > 1 and total > _AT_ONCE_BYTES:
            break
        first.add(number)
    return first


def _by_partition(numbers: Iterable[int], partitions: Sequence[str | None]) -> Collection[list[int]]:
    """Group files by partition, in order. Only files of one partition are compacted together."""
    groups: dict[str | None, list[int]] = {}
    for number in numbers:
        groups.setdefault(partitions[number], []).append(number)
    return groups.values()


def _purged(sizes: Sequence[FileSize], chosen: Collection[int], gone_share: float) -> set[int]:
    """Return the files to rewrite because of deleted rows.

    These have a share of at least `gone_share` of deleted rows, or vectors that took as many bytes as their
    other rows. Takes those with the most deleted bytes first, up to _AT_ONCE_BYTES of remaining rows, but at
    least one. Leaves out files in `chosen`.
    """
    worth = [
        number
        for number, size in enumerate(sizes)
        if (size.gone >= gone_share or size.costs_itself) and size.gone > 0
    ]
    purged: set[int] = set()
    total = 0
    for number in sorted(set(worth) - set(chosen), key=lambda number: -sizes[number].gone_bytes):
        if purged and total + sizes[number].live_bytes > _AT_ONCE_BYTES:
            continue
        purged.add(number)
        total += sizes[number].live_bytes
    return purged


def _sizes(rows: FileRows, row_bytes: int) -> list[FileSize]:
    return [
        FileSize(
            max(file.size, _logged_rows(file) * row_bytes),
            _share_gone(rows, number),
            file.partition,
            file.vector_bytes,
        )
        for number, file in enumerate(rows.files)
    ]


def _logged_rows(file: LiveFile) -> int:
    """Return the number of rows in the log; 0 if another program wrote the file without it."""
    return int(file.statistics.get("numRecords") or 0)


def _share_gone(rows: FileRows, number: int) -> float:
    vector = rows.files[number].vector
    return 0.0 if vector is None else vector.rows / max(rows.count(number), 1)


def _write(rows: FileRows, chosen: Collection[int], cluster_by: Sequence[str]) -> list[WrittenFile]:
    rows.fetch(chosen)
    partitions = [file.partition for file in rows.files]
    with files_beside(rows.uri, rows.schema) as files:
        for numbers in _by_partition(chosen, partitions):
            for batch in clustered((part for number in numbers for part in rows.all_of(number)), cluster_by):
                files.write(batch)
        return files.finish()


@dataclass(frozen=True)
class FileStatistics:
    """The number of a table's data files, their bytes, and the number of files with a deletion vector."""

    files: int
    bytes: int
    marked: int

    @classmethod
    def table(cls, table: DeltaTable) -> FileStatistics:
        """Return the numbers of an open table. Raises LakeTableError, LakeUnavailableError."""
        found = live_files(table).values()
        return cls(
            len(found), sum(file.size for file in found), sum(file.vector is not None for file in found)
        )


@dataclass(frozen=True)
class Compaction:
    """The result of `compact_thoroughly`.

    `is_busy`: gave up because the table's writer committed first each time. `is_left`: stopped because it was
    time to end.
    """

    before: FileStatistics
    after: FileStatistics
    is_busy: bool = False
    is_left: bool = False


def compact_thoroughly(
    uri: str,
    app: str,
    cluster_by: Sequence[str],
    is_time_to_end: Callable[[], bool],
    wait: Callable[[float], object],
) -> Compaction:
    """Compact all small files of a table, and rewrite all files with deleted rows, in one or more commits.

    Only files that exist at the start are rewritten. `cluster_by` as in `compact`. `is_time_to_end` is called
    before each commit. `wait` is called, with seconds, if the table's writer has committed first. Raises
    LakeTableError, LakeUnavailableError; FencedError if a later epoch has written the table.
    """
    table = open_table(uri)
    before, began = FileStatistics.table(table), set(live_files(table))
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
        # Open the table again each time, so that the next commit includes the writer's commits since.
        table = open_table(uri)
    return Compaction(before, FileStatistics.table(table), refused == _ATTEMPTS, is_left)


def _is_compacted(table: DeltaTable, app: str, cluster_by: Sequence[str], among: Collection[str]) -> bool:
    """Compact the table once. Return False if the table's writer committed first."""
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
