"""Hours of the changelog that are over: their many small files are joined into few.

The receiver adds a file or more a second. What it costs to append, to open the changelog and to list its
files grows with their number, so that days of them would slow down everybody.

Files are joined in the order of their LSNs, and only with their neighbours there: a joined file overlaps no
other one. Files that overlap, and so may share a transaction, are joined together or not at all.
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
from airflow_provider_pgrepl.replication.changelog.layout import (
    PARTITION,
    ROW_SCHEMA,
    changelog_uri,
    floor_app,
    hour_of,
)
from airflow_provider_pgrepl.replication.changelog.reader import value_bytes
from airflow_provider_pgrepl.replication.changelog.writer import Part, PartFolder, removal, replace_files
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.storage import open_storage, raise_if_away, read_parquet, refusal

_RETENTION_METADATA = "pgrepl_retention"
_HOUR = f"partition.{PARTITION}"
log = logging.getLogger(__name__)
MARGIN = timedelta(minutes=10)
"""How long an hour has to be over: clocks differ."""
RUN_BYTES = 1 << 30
"""So much of values is joined at a time, but one file at least."""
_JOINED_BYTES = 64 << 20
"""Of the values of a joined file: it is made in memory, and read into memory."""
_LEAST_BYTES = 64 << 10
"""What a file costs at least: as much as one of so many bytes."""
_COMPACTION_METADATA = "pgrepl_compaction"


@dataclass(frozen=True)
class Dropped:
    """What went: the hours, oldest first, and how many files and bytes they held."""

    hours: tuple[str, ...] = ()
    files: int = 0
    bytes: int = 0


def drop_expired(
    lake_root: str, retention_h: float, needed_above: Mapping[int, int], now: datetime
) -> Dropped:
    """Take the oldest hours that ended more than `retention_h` hours ago out of the changelog, in one commit.

    `needed_above`: for each epoch the lowest position that a table, in whatever state, still has a right to;
    a file with a later change stays, and with it its hour and all hours after. An epoch before all of these
    is over, and so is the right to it. Without any, nothing goes.

    The commit carries the new floor of each epoch, under app ids that are not the receiver's, so that it
    does not fence that. The files stay until a vacuum.
    Raises ChangelogError.
    """
    try:
        table = open_delta(changelog_uri(lake_root))
    except TableNotFoundError:
        return Dropped()
    except (DeltaError, OSError) as error:
        raise_if_away("the changelog cannot be opened", error)
        raise ChangelogError(f"the changelog cannot be opened: {type(error).__name__}") from error
    hours = _files_by_hour(table)
    expired = []
    for hour in sorted(hours):
        if not _is_past(hour, now - timedelta(hours=retention_h)):
            break
        if any(_is_needed(file, needed_above) for file in hours[hour]):
            break
        expired.append(hour)
    if not expired:
        return Dropped()
    files = [file for hour in expired for file in hours[hour]]
    _remove(table, files)
    return Dropped(tuple(expired), len(files), sum(file["size_bytes"] for file in files))


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
    """Per epoch, the highest commit LSN that is gone: nobody below may go on, or be read as of later."""
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
    replace_files(table, removes, told={_RETENTION_METADATA: str(len(removes))}, apps=_floors(table, files))


@dataclass(frozen=True)
class Joined:
    """How many files went, and how many came instead."""

    files: int = 0
    into: int = 0


class ListedFile(NamedTuple):
    """A file of the list; its bytes on the disk and of its values, its epoch and its commit LSNs."""

    path: str
    size: int
    bytes: int
    hour: str
    epoch: int
    min_lsn: int
    max_lsn: int


def join_closed_hours(lake_root: str, now: datetime, most_bytes: int = RUN_BYTES) -> Joined:
    """Join the files of hours that are over, the oldest first, one commit an hour; `most_bytes` of values.

    Nothing to do gives nothing. No row changes: who follows the commits has nothing to read, and finds the
    files that went where they were until a vacuum takes them. Raises ChangelogError, LakeUnavailableError;
    hours that were committed before stay joined.
    """
    try:
        table = open_delta(changelog_uri(lake_root))
        files = _listed(table)
    except TableNotFoundError:
        return Joined()
    except (DeltaError, OSError, KeyError, ValueError) as error:
        raise ChangelogError(f"the changelog's files cannot be listed: {type(error).__name__}") from error
    hours: defaultdict[str, list[list[ListedFile]]] = defaultdict(list)
    for group in groups_to_join(files, hour_of(now - MARGIN), most_bytes):
        hours[group[0].hour].append(group)
    done = Joined()
    for groups in hours.values():
        joined, is_alone = _join_hour(table, groups)
        done = Joined(done.files + joined.files, done.into + joined.into)
        if not is_alone:
            break
    return done


def groups_to_join(files: Iterable[ListedFile], before: str, most_bytes: int) -> Iterator[list[ListedFile]]:
    """Files of hours before another that each become one, in order; of files as they are in the list, by
    epoch and LSN.

    At least two of each are less than half of what a joined file may be: what was joined is left alone.
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
    """Files whose LSNs lie between one another's; most are alone."""
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
    """The epoch and hour of files that overlap; None when they are of several, or too much for one file."""
    hours = {file.hour for file in some}
    if len(hours) > 1 or _bytes(some) > _JOINED_BYTES:
        return None
    return some[0].epoch, hours.pop()


def _bytes(files: Iterable[ListedFile]) -> int:
    return sum(file.bytes for file in files)


def _listed(table: DeltaTable) -> list[ListedFile]:
    """By epoch and LSN; of those at one place the earlier written comes first."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    actions = actions.filter(pc.equal(actions["min.epoch"], actions["max.epoch"])).sort_by(
        [(name, "ascending") for name in ("min.epoch", "min.commit_lsn", "modification_time")]
    )
    names = ["size_bytes", f"partition.{PARTITION}", "min.epoch", "min.commit_lsn", "max.commit_lsn"]
    columns = zip(*(actions[name].to_pylist() for name in ("path", *names)), strict=True)
    return [ListedFile(path, size, value_bytes(path), *rest) for path, size, *rest in columns]


def _join_hour(table: DeltaTable, groups: list[list[ListedFile]]) -> tuple[Joined, bool]:
    """In one commit; and whether nobody else has changed the list meanwhile."""
    folder, joined = PartFolder(table.table_uri), dict[Part, list[ListedFile]]()
    try:
        for group in groups:
            part = _join(table.table_uri, folder, group)
            if part is not None:
                joined[part] = group
    except OSError as error:
        # The storage may be full: what is not used must not fill it.
        folder.discard(joined)
        raise refusal(f"the files of {groups[0][0].hour} in the changelog cannot be joined", error) from error
    if not joined:
        return Joined(), True
    gone = [file for group in joined.values() for file in group]
    removes = [removal(file.path, file.size, file.hour) for file in gone]
    # What is written stays if this is refused: a storage may answer a commit that it has taken with a no.
    is_alone = replace_files(table, removes, list(joined), told={_COMPACTION_METADATA: str(len(gone))})
    return Joined(len(gone), len(joined)), is_alone


def _join(uri: str, folder: PartFolder, group: list[ListedFile]) -> Part | None:
    """Write the rows of some files as one; None when one is lost, as its readers tell. Raises OSError."""
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
    """By relation, and within each in stream order; what has no order of its own, as in the list."""
    keys = [rows[name].to_numpy() for name in ("ordinal", "commit_lsn", "relation_id")]
    return rows.take(pa.array(np.lexsort(keys)))
