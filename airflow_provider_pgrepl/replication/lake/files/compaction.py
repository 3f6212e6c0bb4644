"""Files of a lake table written again as fewer: small ones, and those of which many rows are gone.

What is written for a change must not grow with the table. So files are joined by tiers: ten that are small
make one of the next size, and each row is written once for each tier, however many there are. A file whose
rows are marked one by one is written again when a quarter of them is gone: three rows at most for each. Or
earlier, once its vectors, each of which names all of them, have cost as much as the file.
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
    check_version,
    commit_actions,
    removed,
)
from airflow_provider_pgrepl.replication.lake.delta.fenced_commit import (
    bounded,
    commit_properties,
    fenced,
    narrow_bounds,
)
from airflow_provider_pgrepl.replication.lake.delta.live_files import LiveFile, app_version, live_files
from airflow_provider_pgrepl.replication.lake.delta.parquet_writer import WrittenFile, files_beside
from airflow_provider_pgrepl.replication.lake.delta.table import FENCED_HINT, open_table, read_position
from airflow_provider_pgrepl.replication.lake.files.merge_on_read import has_vectors, without_vectors
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import MIB
from airflow_provider_pgrepl.replication.storage import durable, storage_errors

_RUN_BYTES = 128 << 20
"""Of rows that are ordered at once, uncompressed: the longer, the more memory it takes."""
_BATCH_BYTES, _BATCH_ROWS = 4 << 20, 64 << 10
_TIERS = (4 << 10, 32 << 10, 256 << 10, 2 * MIB, 16 * MIB)
"""Sizes below which files are alike, in bytes; from the last on they are not small."""
ROW_BYTES = 32
"""A row counts as so many at least, beside changes: rows that compress well are as much work."""
_PURGED_SHARE = 0.25
_AT_ONCE_BYTES = 32 * MIB
"""Of how many bytes files are joined, and purged, at once: the table's next changes wait for it."""
_AT_LEAST = 2
_ANY_SHARE = 0.0
_ATTEMPTS = 5
_FIRST_WAIT_S = 0.5


def clustered(parts: Iterable[pa.Table], columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """The rows of all parts, in small batches, and in runs each of which is ordered by the columns, as far as
    there are any that can order rows: nested values cannot."""
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
    """What compaction looks at of a file: its bytes, the share of its rows that is gone, its partition, and
    how many bytes were written to say which these are."""

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
    """Join small files once there are `at_least` of a size, in which a row counts as `row_bytes` at least,
    and write those again of which so much is gone; of all, or of those `among` some paths. Their rows are
    ordered by `cluster_by`, as far as the table has such columns.

    How many files went. Changes no row and not the position (`dataChange` is false), and leaves the table to
    who has committed meanwhile. Raises FencedError when that was another writer of this pipeline, or when the
    epoch is over, LakeTableError, LakeUnavailableError.
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
    """Whether `compact` would write any file again. Raises FencedError when the epoch is over,
    LakeTableError, LakeUnavailableError."""
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
    """Write all files again of which rows are marked, and let readers in that know no deletion vectors.

    Whether that was done; nothing is when there is nothing to withdraw, or when somebody has committed
    meanwhile. Older versions of the table still want such readers. Raises what `compact` does.
    """
    position = read_position(table, app)
    if position is None or not can_commit(table) or not has_vectors(table):
        return False
    rows = FileRows(table)
    marked = [number for number, file in enumerate(rows.files) if file.vector is not None]
    if not _rewrite(table, app, position, rows, marked, more=lambda: without_vectors(table)):
        return False
    # Whoever reads the newest version begins here, and meets no vector at all.
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
    """Write these files again, in one commit with `more` actions; whether nobody was faster."""
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
    """False, who has committed meanwhile having changed nothing of ours; else raises FencedError."""
    table.update_incremental()
    if app_version(table, app) == position:
        return False
    raise FencedError(f"{table.table_uri}: another process has written this table", FENCED_HINT)


def files_to_compact(sizes: Sequence[FileSize], at_least: int, gone_share: float) -> list[int]:
    """The numbers of the files to write again, in order."""
    chosen = {number for number, size in enumerate(sizes) if size.gone == 1}
    total = 0
    for partition in _by_partition(range(len(sizes)), [size.partition for size in sizes]):
        joined = _joined(sizes, partition, at_least) if total < _AT_ONCE_BYTES else set()
        total += sum(sizes[number].live_bytes for number in joined)
        chosen |= joined
    return sorted(chosen | _purged(sizes, chosen, gone_share))


def _joined(sizes: Sequence[FileSize], numbers: Sequence[int], at_least: int) -> set[int]:
    """Of these files, those of each tier that has enough, and all that are smaller; the smallest first, up to
    so many bytes, but two at least."""
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
    """Files of one partition each, in order; only these are joined."""
    groups: dict[str | None, list[int]] = {}
    for number in numbers:
        groups.setdefault(partitions[number], []).append(number)
    return groups.values()


def _purged(sizes: Sequence[FileSize], chosen: Collection[int], gone_share: float) -> set[int]:
    """Those of which most is gone, in bytes, up to so many that are left, but one at least."""
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
            max(file.size, _told_rows(file) * row_bytes),
            _share_gone(rows, number),
            file.partition,
            file.vector_bytes,
        )
        for number, file in enumerate(rows.files)
    ]


def _told_rows(file: LiveFile) -> int:
    """As far as the log says: none, where somebody else has written it without."""
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
