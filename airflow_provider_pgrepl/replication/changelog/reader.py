"""Reader of the changelog: its commits, the files that may hold a relation, and a relation's rows in order.

A reader at the end of the changelog keeps its state in a ChangelogTail, updated commit by commit. delta-rs
would keep some 45 kB of memory for each commit. A reader that continues from a position needs only the later
files and the app transactions.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import (
    ChangelogFileGoneError,
    LakeUnavailableError,
    NoChangelogError,
    SnapshotError,
)
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.storage import (
    is_storage_error,
    open_file,
    open_parquet,
    open_storage,
    read_commit_actions,
    read_parquet,
    requests_at_once,
    storage_error,
)

from .layout import (
    AT_REST_APP,
    DURABLE_APP,
    EPOCH_APP,
    METADATA_KEY,
    RECEIVER_APP,
    ROW_SCHEMA,
    SHARED_APP,
    STATUS_ORDINAL,
    TORN_DOWN_APP,
    CommitRecord,
    EpochRecord,
    floor_app,
)
from .relations import RelationRecord

Ints = np.ndarray[Any, np.dtype[np.int64]]
_SMALL_BYTES, _KEPT_BYTES = 256 << 10, 16 << 20
_TIME = pa.timestamp("us", "UTC")


@dataclass(frozen=True)
class CachedFile:
    """The rows of a file. `order`: row numbers, sorted by relation (stable); `relations`: their relations."""

    rows: pa.Table
    order: Ints
    relations: Ints

    @classmethod
    def of(cls, rows: pa.Table) -> CachedFile:
        """Index changelog rows by their relation_id."""
        relations = rows["relation_id"].to_numpy()
        order = np.argsort(relations, kind="stable")
        return cls(rows, order, relations[order])

    def rows_of(self, relation_id: int) -> pa.Table:
        """Return the rows of one relation, in file order."""
        first = int(np.searchsorted(self.relations, relation_id))
        last = int(np.searchsorted(self.relations, relation_id, side="right"))
        return self.rows.take(pa.array(self.order[first:last]))


class FileCache:
    """A cache of the most recently used files, by path, up to `most_bytes` bytes of rows.

    A file never changes, and no two files have the same path. Safe for concurrent threads.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._files: OrderedDict[str, CachedFile] = OrderedDict()
        self._bytes = 0
        self._changing = threading.Lock()

    def get(self, path: str) -> CachedFile | None:
        """Return a cached file, or None."""
        with self._changing:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
            return file

    def keep(self, path: str, rows: pa.Table) -> CachedFile:
        """Add a file, and evict the least recently used other files above the limit."""
        file = CachedFile.of(rows)
        with self._changing:
            if path not in self._files:
                self._bytes += rows.nbytes
            self._files[path] = file
            while self._bytes > self._most_bytes and len(self._files) > 1:
                self._bytes -= self._files.popitem(last=False)[1].rows.nbytes
        return file


_kept = FileCache(_KEPT_BYTES)


class AppTransactions(Protocol):
    """The app transactions of an open changelog."""

    def transaction_version(self, app_id: str) -> int | None:
        """Return the last version that a commit set for an app ID, or None."""


@dataclass(frozen=True)
class ChangelogFile:
    """A file of the changelog, and the ranges of LSNs and relation IDs in it."""

    path: str
    value_bytes: int
    min_lsn: LSN
    max_lsn: LSN
    min_relation: int
    max_relation: int

    def may_hold(self, relation_id: int) -> bool:
        return self.min_relation <= relation_id <= self.max_relation


@dataclass(frozen=True)
class Commit:
    """One commit of the changelog. `record` is None if the commit has none (such as that of retention)."""

    version: int
    record: CommitRecord | None
    files: tuple[ChangelogFile, ...]


def read_epoch(uri: str) -> EpochRecord:
    """Return the record of the changelog's epoch. Raises ChangelogError if there is none."""
    return EpochRecord.from_json(open_changelog(uri).metadata().description)


def check_timeline(changelog: DeltaTable, record: EpochRecord) -> None:
    """Raise SnapshotError if the open changelog continues from another server than the one in `record`.

    Rows that were read from the former server may be lost in the present one. Raises ChangelogError.
    """
    now = EpochRecord.from_json(changelog.metadata().description)
    if (now.epoch, now.timeline) != (record.epoch, record.timeline):
        raise SnapshotError(
            f"the source failed over to timeline {now.timeline} while rows were read on timeline"
            f" {record.timeline}",
            "run the command again, which reads the new primary",
        )


def lake_id(changelog: DeltaTable) -> str:
    """Return the lake's ID: the Delta table ID of its changelog, which a new epoch does not change."""
    return str(changelog.metadata().id)


def open_changelog(uri: str) -> DeltaTable:
    """Open the changelog. Raises NoChangelogError if there is none, LakeUnavailableError if opening fails."""
    try:
        return open_delta(uri)
    except TableNotFoundError:
        raise NoChangelogError(
            f"there is no changelog in {uri}",
            "check that lake names the right folder and that it is mounted. For a new pipeline,"
            f" {errors.SNAPSHOT}",
        ) from None
    except (DeltaError, OSError) as error:
        raise unreadable_changelog(uri, error) from None


def unreadable_changelog(uri: str, error: BaseException) -> LakeUnavailableError:
    """Return the error of a changelog that cannot be opened.

    A retry helps for a damaged log, too: the replication app repairs at its start what a crash has left.
    """
    doing = f"the changelog in {uri} cannot be opened"
    if is_storage_error(error):
        return storage_error(doing, error)
    return LakeUnavailableError(
        f"{doing}: its log is incomplete or damaged ({type(error).__name__})",
        "start the replication app, which sets aside commits that a crash has left incomplete. If it fails as"
        " well, restore this folder from a copy of the lake",
    )


def read_token(table: AppTransactions) -> int:
    """Return the token that the source also stores, as the last start of a receiver wrote it; 0 for none."""
    return table.transaction_version(SHARED_APP) or 0


def read_sequence(table: AppTransactions) -> int:
    """Return the number of commits to the open changelog by receivers and by starts of epochs."""
    return table.transaction_version(RECEIVER_APP) or 0


def is_at_rest(table: AppTransactions) -> bool:
    """Return True if the last receiver of the open changelog shut down by itself, or if none has run."""
    return table.transaction_version(AT_REST_APP) == read_sequence(table)


def is_torn_down(table: AppTransactions) -> bool:
    """Return True if a teardown ended the epoch of the open changelog and kept the changelog."""
    return table.transaction_version(TORN_DOWN_APP) == read_sequence(table)


def read_durable_lsn(table: AppTransactions) -> LSN:
    """Return the LSN up to which the open changelog holds every change of its epoch."""
    return LSN(table.transaction_version(DURABLE_APP) or 0)


def read_floor_lsn(table: AppTransactions, epoch: Epoch) -> LSN:
    """Return the highest commit LSN that retention has dropped; a table below it cannot continue."""
    return LSN(table.transaction_version(floor_app(epoch)) or 0)


def read_epoch_number(table: AppTransactions) -> Epoch:
    """Return the epoch of the open changelog, 0 if it has none."""
    return Epoch(table.transaction_version(EPOCH_APP) or 0)


def read_commit(filesystem: pafs.FileSystem, root: str, version: int) -> Commit:
    """Read one commit from its log file. Raises FileNotFoundError if the log file no longer exists."""
    record = None
    files = []
    for action in read_commit_actions(filesystem, root, version):
        if "commitInfo" in action and METADATA_KEY in action["commitInfo"]:
            record = CommitRecord.from_json(action["commitInfo"][METADATA_KEY])
        elif "add" in action and action["add"].get("dataChange", True):
            files.append(file_of_action(action["add"]))
    return Commit(version, record, tuple(files))


def file_of_action(add: dict[str, object]) -> ChangelogFile:
    """Return the file that a commit's `add` action describes. Raises KeyError, TypeError, ValueError."""
    stats = json.loads(str(add["stats"]))
    low, high = stats["minValues"], stats["maxValues"]
    return ChangelogFile(
        str(add["path"]),
        value_bytes(str(add["path"])),
        LSN(low["commit_lsn"]),
        LSN(high["commit_lsn"]),
        low["relation_id"],
        high["relation_id"],
    )


def value_bytes(path: str) -> int:
    """Return the bytes of a file's uncompressed values, which are part of its name. Raises ValueError."""
    return int(path.rpartition("-")[2].removesuffix(".parquet"))


def live_files(table: DeltaTable, epoch: Epoch, above_lsn: LSN) -> list[ChangelogFile]:
    """Return the files of an epoch that may hold changes above an LSN, ordered by first LSN."""
    actions = pa.table(table.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    wanted = actions.filter(
        pc.and_(pc.equal(actions["min.epoch"], epoch), pc.greater(actions["max.commit_lsn"], above_lsn))
    ).sort_by("min.commit_lsn")
    return [
        ChangelogFile(
            row["path"],
            value_bytes(row["path"]),
            LSN(row["min.commit_lsn"]),
            LSN(row["max.commit_lsn"]),
            row["min.relation_id"],
            row["max.relation_id"],
        )
        for row in wanted.to_pylist()
    ]


def read_rows(
    filesystem: pafs.FileSystem,
    root: str,
    paths: Iterable[str],
    relation_id: int,
    above_lsn: LSN,
    columns: Sequence[str] | None = None,
) -> pa.Table:
    """Return one relation's rows above an LSN from the given files, ordered by (commit_lsn, ordinal).

    The rows are in ROW_SCHEMA, or have its `columns`, which must include commit_lsn, ordinal and relation_id.
    """
    paths = list(paths)
    with requests_at_once(filesystem, len(paths)) as each:
        read = each(lambda path: _read_file(filesystem, f"{root}/{path}", relation_id, columns), paths)
        pieces = [piece for some in read for piece in some]
    rows = (
        pa.concat_tables(pieces) if pieces else ROW_SCHEMA.empty_table().select(columns or ROW_SCHEMA.names)
    )
    if pc.min(rows["commit_lsn"]).as_py() is not None and pc.min(rows["commit_lsn"]).as_py() <= above_lsn:
        rows = rows.filter(pc.greater(rows["commit_lsn"], above_lsn))
    return ordered(rows)


def ordered(rows: pa.Table) -> pa.Table:
    """Return changelog rows ordered by (commit_lsn, ordinal)."""
    return rows if _is_sorted(rows) else rows.sort_by([("commit_lsn", "ascending"), ("ordinal", "ascending")])


def rows_before(rows: pa.Table, lsn: LSN) -> pa.Table:
    """Return the rows before the transaction at an LSN. `rows` are ordered by (commit_lsn, ordinal).

    Rows that belong to no transaction and are ordered directly before this one are included.
    """
    if len(rows) == 0 or rows["commit_lsn"][-1].as_py() < lsn:
        return rows
    earlier = pc.less(rows["commit_lsn"], lsn)
    between = pc.and_(pc.equal(rows["commit_lsn"], lsn), pc.less_equal(rows["ordinal"], STATUS_ORDINAL))
    return rows.filter(pc.or_(earlier, between))


def _read_file(
    filesystem: pafs.FileSystem, path: str, relation_id: int, columns: Sequence[str] | None = None
) -> Sequence[pa.Table]:
    kept = _kept.get(path)
    # A caller that reads all columns is a merge; merges of other tables then read the same file. Callers that
    # read some columns scan many files once, so those files are not cached.
    if kept is None and (columns is not None or value_bytes(path) > _SMALL_BYTES):
        with _open_file(filesystem, path) as file:
            return _read_groups(file, relation_id, columns)
    if kept is None:
        with _open_file(filesystem, path) as file:
            kept = _kept.keep(path, file.read(use_threads=False))
    rows = kept.rows_of(relation_id)
    return [rows if columns is None else rows.select([n for n in rows.schema.names if n in columns])]


def missing_file(path: str) -> ChangelogFileGoneError:
    """Return the error for a changelog file that is missing although a commit names it."""
    return ChangelogFileGoneError(
        f"changelog file {path} no longer exists",
        "run the command again: its hour may have been compacted or dropped. If the error persists,"
        " restore the file. If it is lost, resnapshot the lagging tables that pgrepl status FILE.json"
        " lists; publishers that have not sent its changes lose them",
    )


@contextmanager
def _open_file(filesystem: pafs.FileSystem, path: str) -> Iterator[pq.ParquetFile]:
    try:
        source = open_file(filesystem, path, value_bytes(path))
    except FileNotFoundError:
        raise missing_file(path) from None
    with source, open_parquet(filesystem, source) as file:
        yield file


def _read_groups(file: pq.ParquetFile, relation_id: int, columns: Sequence[str] | None) -> Sequence[pa.Table]:
    """Read a relation's rows from the row groups that may hold the relation."""
    column = file.schema_arrow.get_field_index("relation_id")
    pieces = []
    for group in range(file.metadata.num_row_groups):
        statistics = file.metadata.row_group(group).column(column).statistics
        if not statistics.min <= relation_id <= statistics.max:
            continue
        piece = file.read_row_group(group, columns=columns, use_threads=False)
        if statistics.min != statistics.max:
            piece = piece.filter(pc.equal(piece["relation_id"], relation_id))
        pieces.append(piece)
    return pieces


def _is_sorted(rows: pa.Table) -> bool:
    lsns, ordinals = rows["commit_lsn"].to_numpy(), rows["ordinal"].to_numpy()
    ahead = lsns[1:] > lsns[:-1]
    return bool((ahead | ((lsns[1:] == lsns[:-1]) & (ordinals[1:] > ordinals[:-1]))).all())


def find_relation_record(uri: str, relation_id: int, version: int) -> RelationRecord | None:
    """Return the op `R` record of a relation version in the current epoch, or None.

    Slow: reads every file of the epoch that may hold the relation, newest first, until it is found.
    """
    table = open_changelog(uri)
    epoch = EpochRecord.from_json(table.metadata().description).epoch
    filesystem, root = open_storage(uri)
    for file in reversed(live_files(table, epoch, LSN(0))):
        if not file.may_hold(relation_id):
            continue
        for piece in _read_file(filesystem, f"{root}/{file.path}", relation_id):
            wanted = pc.and_(pc.equal(piece["op"], "R"), pc.equal(piece["relation_version"], version))
            found = piece.filter(wanted)
            if found.num_rows:
                return RelationRecord.from_json(found["new"][0].as_py()[0])
    return None


@dataclass
class ChangelogTail:
    """The changelog as of a version. `files`: those of one epoch, by path.

    Files without changes above the last requested LSN may be missing from `files`.
    """

    version: int
    description: str
    epoch: Epoch
    files: dict[str, ChangelogFile]
    _transactions: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, table: DeltaTable, epoch: Epoch, above_lsn: LSN) -> ChangelogTail:
        """Create the tail of an open changelog, with an epoch's files that may hold changes above an LSN."""
        apps = [DURABLE_APP, EPOCH_APP]
        apps += [floor_app(number) for number in range(1, read_epoch_number(table) + 1)]
        versions = {app: table.transaction_version(app) for app in apps}
        return cls(
            table.version(),
            table.metadata().description,
            epoch,
            {file.path: file for file in live_files(table, epoch, above_lsn)},
            {app: version for app, version in versions.items() if version is not None},
        )

    @property
    def record(self) -> EpochRecord:
        """The record of the changelog's epoch. Raises ChangelogError."""
        return EpochRecord.from_json(self.description)

    def transaction_version(self, app_id: str) -> int | None:
        """Return the version of an app ID of the changelog, as `DeltaTable.transaction_version` does."""
        return self._transactions.get(app_id)

    def files_above(self, lsn: LSN) -> list[ChangelogFile]:
        """Return the files that may hold changes above an LSN, by first LSN, and remove all others."""
        self.files = {path: file for path, file in self.files.items() if file.max_lsn > lsn}
        return sorted(self.files.values(), key=lambda file: file.min_lsn)

    def take(self, actions: Iterable[dict[str, Any]]) -> None:
        """Apply the actions of the next commit, and advance `version` by 1.

        Raises KeyError, TypeError, ValueError if the commit is not one of a changelog.
        """
        for action in actions:
            if "add" in action:
                self._add(action["add"])
            elif "remove" in action:
                self.files.pop(action["remove"]["path"], None)
            elif "txn" in action:
                self._transactions[action["txn"]["appId"]] = action["txn"]["version"]
            elif "metaData" in action:
                self.description = action["metaData"]["description"]
        self.version += 1

    def _add(self, add: dict[str, Any]) -> None:
        if json.loads(add["stats"])["minValues"]["epoch"] == self.epoch:
            file = file_of_action(add)
            self.files[file.path] = file


def first_commit_after(table: DeltaTable, epoch: Epoch, moment: datetime) -> LSN | None:
    """Return the lowest commit LSN of the epoch whose commit time is after `moment`, by the source's clock.

    Returns None if the open changelog holds no such commit. Commit times need not increase with the LSN, but
    every transaction before the result committed at or before `moment`. Files are skipped by their
    statistics; of the others, 2 columns are read. Raises ChangelogFileGoneError if a file no longer exists.
    """
    files = pa.table(table.get_add_actions(flatten=True))
    if files.num_rows == 0:
        return None
    files = files.filter(pc.equal(files["min.epoch"], int(epoch))).sort_by("min.commit_lsn")
    if "max.commit_ts" in files.column_names:
        # Bounds are rounded outwards. A file without bounds may hold any commit time.
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
        raise missing_file(path) from None
    later = rows.filter(pc.greater(rows["commit_ts"], pa.scalar(moment, _TIME)))
    found: int | None = pc.min(later["commit_lsn"]).as_py()
    return found
