"""Maintenance of the changelog: drops expired hours, and compacts the small files of closed hours.

The receiver adds at least one file a second. The cost of appending to the changelog, of opening it and of
listing its files grows with their number: the files of a few days would slow down every reader and writer.

Only files with adjacent LSNs are compacted into one, so a compacted file overlaps no other file. Files that
overlap may share a transaction; they are compacted together or not at all.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import ChangelogError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import open_storage, read_parquet, storage_error

from .layout import PARTITION, ROW_SCHEMA, changelog_uri, floor_app, hour_of
from .reader import unreadable_changelog, value_bytes
from .writer import Part, PartFolder, removal, replace_files

_RETENTION_METADATA = "pgrepl_retention"
_HOUR = f"partition.{PARTITION}"
log = logging.getLogger(__name__)
MARGIN = timedelta(minutes=10)
"""The time after its end at which an hour counts as closed, because the clocks of hosts differ."""
RUN_BYTES = 1 << 30
"""Bytes of uncompressed values after which a run starts to compact no further group of files."""
_JOINED_BYTES = 64 << 20
"""The maximum size of a compacted file's uncompressed values: writers and readers hold them in memory."""
_LEAST_BYTES = 64 << 10
"""The size that a smaller file counts as: reading a file has a minimum cost."""
_COMPACTION_METADATA = "pgrepl_compaction"


@dataclass(frozen=True)
class DroppedHours:
    """The hours that were dropped, oldest first, and the number and size in bytes of their files."""

    hours: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def drop_expired(
    lake_root: str, retention_h: float, needed_above: Mapping[int, int], now: datetime
) -> DroppedHours:
    """Remove the oldest hours that ended more than `retention_h` hours ago from the changelog, in one commit.

    `needed_above`: for each epoch, the lowest position that a table in any state may still continue from. A
    file with a later change is kept, and with it its hour and all later hours. Epochs before the first of
    `needed_above` are not needed. If `needed_above` is empty, nothing is dropped.

    The commit sets the new floor of each epoch, under app IDs other than the receiver's, so that it does not
    fence the receiver. The files themselves are deleted by a vacuum.
    Raises LakeUnavailableError.
    """
    try:
        table = open_delta(changelog_uri(lake_root))
    except TableNotFoundError:
        return DroppedHours()
    except (DeltaError, OSError) as error:
        raise unreadable_changelog(changelog_uri(lake_root), error) from error
    hours = _files_by_hour(table)
    expired = []
    for hour in sorted(hours):
        if not _is_past(hour, now - timedelta(hours=retention_h)):
            break
        if any(_is_needed(file, needed_above) for file in hours[hour]):
            break
        expired.append(hour)
    if not expired:
        return DroppedHours()
    files = [file for hour in expired for file in hours[hour]]
    _remove(table, files)
    return DroppedHours(tuple(expired), len(files), sum(file["size_bytes"] for file in files))


def _files_by_hour(table: DeltaTable) -> dict[str, list[dict[str, Any]]]:
    hours: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    actions = pa.table(table.get_add_actions(flatten=True))
    for file in actions.to_pylist():
        hours[file[_HOUR]].append(file)
    return hours


def _is_past(hour: str, before: datetime) -> bool:
    return hour < hour_of(before)


def _is_needed(file: Mapping[str, Any], needed_above: Mapping[int, int]) -> bool:
    epoch, last_lsn = file.get("max.epoch"), file.get("max.commit_lsn")
    if epoch is None or last_lsn is None or not needed_above:
        return True
    if epoch < min(needed_above):
        return False
    return epoch not in needed_above or last_lsn > needed_above[epoch]


def _floors(table: DeltaTable, files: list[dict[str, Any]]) -> list[Transaction]:
    """Return the app transactions that set each epoch's floor, the highest commit LSN that is dropped.

    A table at a position below the floor can neither continue nor be read as of a later point.
    """
    floors: defaultdict[int, int] = defaultdict(int)
    for file in files:
        floors[file["max.epoch"]] = max(floors[file["max.epoch"]], int(file["max.commit_lsn"]))
    return [
        Transaction(floor_app(epoch), floor)
        for epoch, floor in floors.items()
        if floor > (table.transaction_version(floor_app(epoch)) or 0)
    ]


def _remove(table: DeltaTable, files: list[dict[str, Any]]) -> None:
    removes = [removal(file["path"], file["size_bytes"], file[_HOUR]) for file in files]
    replace_files(
        table, removes, metadata={_RETENTION_METADATA: str(len(removes))}, apps=_floors(table, files)
    )


@dataclass(frozen=True)
class CompactedFiles:
    """The number of files that were compacted, and of the files that replaced them."""

    files: int = 0
    into: int = 0


class ListedFile(NamedTuple):
    """A file of the changelog. `size`: bytes on disk; `bytes`: bytes of its uncompressed values."""

    path: str
    size: int
    bytes: int
    hour: str
    epoch: int
    min_lsn: int
    max_lsn: int


def compact_closed_hours(lake_root: str, now: datetime, most_bytes: int = RUN_BYTES) -> CompactedFiles:
    """Compact the files of closed hours, oldest epoch and LSN first, in one commit for each hour.

    Starts no further group of files after `most_bytes` bytes of values. No row changes: a reader that follows
    the commits has nothing to read, and the replaced files stay readable until a vacuum. Stops early if
    another maintenance run has changed the list of files. Does nothing if there is no changelog.

    Raises ChangelogError, LakeUnavailableError; hours committed before the error stay compacted.
    """
    try:
        table = open_delta(changelog_uri(lake_root))
        files = _listed(table)
    except TableNotFoundError:
        return CompactedFiles()
    except (DeltaError, OSError, KeyError, ValueError) as error:
        raise ChangelogError(f"the changelog's files cannot be listed: {type(error).__name__}") from error
    hours: defaultdict[str, list[list[ListedFile]]] = defaultdict(list)
    for group in groups_to_join(files, hour_of(now - MARGIN), most_bytes):
        hours[group[0].hour].append(group)
    done = CompactedFiles()
    for groups in hours.values():
        joined, is_alone = _join_hour(table, groups)
        done = CompactedFiles(done.files + joined.files, done.into + joined.into)
        if not is_alone:
            break
    return done


def groups_to_join(files: Iterable[ListedFile], before: str, most_bytes: int) -> Iterator[list[ListedFile]]:
    """Yield the groups of files, of hours before `before`, that each become one file. `files` are sorted by
    epoch and LSN; the groups keep this order.

    Each group has at least two files below half of the maximum size, so compacted files are left unchanged.
    """
    cost = 0
    for group in _groups(files, before):
        if sum(file.bytes < _JOINED_BYTES // 2 for file in group) < 2:
            continue
        if cost >= most_bytes:
            return
        cost += sum(max(file.bytes, _LEAST_BYTES) for file in group)
        yield group


def _groups(files: Iterable[ListedFile], before: str) -> Iterator[list[ListedFile]]:
    for place, neighbours in groupby(_overlapping(files), key=_place):
        if place is None or place[1] >= before:
            continue
        group: list[ListedFile] = []
        for some in neighbours:
            if group and _bytes(group) + _bytes(some) > _JOINED_BYTES:
                yield group
                group = []
            group += some
        yield group


def _overlapping(files: Iterable[ListedFile]) -> Iterator[list[ListedFile]]:
    """Yield the lists of files whose LSN ranges overlap; most lists hold one file."""
    some: list[ListedFile] = []
    reach = 0
    for file in files:
        if some and (file.epoch != some[0].epoch or file.min_lsn > reach):
            yield some
            some, reach = [], 0
        some.append(file)
        reach = max(reach, file.max_lsn)
    if some:
        yield some


def _place(some: list[ListedFile]) -> tuple[int, str] | None:
    """Return the epoch and hour of overlapping files.

    Returns None if they belong to several hours, or are too large for one file.
    """
    hours = {file.hour for file in some}
    if len(hours) > 1 or _bytes(some) > _JOINED_BYTES:
        return None
    return some[0].epoch, hours.pop()


def _bytes(files: Iterable[ListedFile]) -> int:
    return sum(file.bytes for file in files)


def _listed(table: DeltaTable) -> list[ListedFile]:
    """Return the files with rows of a single epoch, ordered by epoch, first LSN and time of writing."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    actions = actions.filter(pc.equal(actions["min.epoch"], actions["max.epoch"])).sort_by(
        [(name, "ascending") for name in ("min.epoch", "min.commit_lsn", "modification_time")]
    )
    names = ["size_bytes", f"partition.{PARTITION}", "min.epoch", "min.commit_lsn", "max.commit_lsn"]
    columns = zip(*(actions[name].to_pylist() for name in ("path", *names)), strict=True)
    return [ListedFile(path, size, value_bytes(path), *rest) for path, size, *rest in columns]


def _join_hour(table: DeltaTable, groups: list[list[ListedFile]]) -> tuple[CompactedFiles, bool]:
    """Compact groups of files in one commit.

    Also returns True if no other maintenance run has changed the list of files. Raises ChangelogError,
    LakeUnavailableError.
    """
    folder, joined = PartFolder(table.table_uri), dict[Part, list[ListedFile]]()
    try:
        for group in groups:
            part = _join(table.table_uri, folder, group)
            if part is not None:
                joined[part] = group
    except OSError as error:
        # Delete unused files: the storage may be full.
        folder.discard(joined)
        raise storage_error(
            f"the files of {groups[0][0].hour} in the changelog cannot be joined", error
        ) from error
    if not joined:
        return CompactedFiles(), True
    gone = [file for group in joined.values() for file in group]
    removes = [removal(file.path, file.size, file.hour) for file in gone]
    # Keep the written files if the commit fails: a storage may report an error for a commit that it has made.
    is_alone = replace_files(table, removes, list(joined), metadata={_COMPACTION_METADATA: str(len(gone))})
    return CompactedFiles(len(gone), len(joined)), is_alone


def _join(uri: str, folder: PartFolder, group: list[ListedFile]) -> Part | None:
    """Write the rows of a group of files as one file.

    Returns None, with a warning in the log, if a file is missing or damaged. Raises OSError.
    """
    hour = group[0].hour
    with suppress(FileNotFoundError, pa.ArrowInvalid):
        return folder.write(_in_order(_read(uri, group)), hour)
    log.warning("%d files of %s in the changelog stay: one of them is gone or damaged", len(group), hour)
    return None


def _read(uri: str, group: list[ListedFile]) -> pa.Table:
    filesystem, root = open_storage(uri)
    paths = (f"{root.rstrip('/')}/{file.path}" for file in group)
    tables = [read_parquet(filesystem, path, ROW_SCHEMA.names) for path in paths]
    return pa.concat_tables(tables).combine_chunks()


def _in_order(rows: pa.Table) -> pa.Table:
    """Return the rows by relation, and within a relation in stream order. Equal rows keep their order."""
    keys = [rows[name].to_numpy() for name in ("ordinal", "commit_lsn", "relation_id")]
    return rows.take(pa.array(np.lexsort(keys)))
