"""Consistent points: for one position of the source, the version of each lake table that shows it.

Each point is a row of the Delta table `<lake>/_pgrepl/consistent_points`; points are ordered by (epoch, lsn).
A reader that reads all tables at the versions of one point never sees half of a source transaction.

A point can show that an unchanged table is complete up to a later LSN than its own position. That holds only
while the table has what the point names. A folder that was restored from a copy or lost its newest commits
does not.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, Schema, Transaction
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from airflow_provider_pgrepl.errors import (
    ChangelogError,
    FencedError,
    LakeChangedError,
    LakeError,
    LakeTableError,
    LakeUnavailableError,
    NoChangelogError,
    PgReplError,
)
from airflow_provider_pgrepl.replication.changelog import own_tables
from airflow_provider_pgrepl.replication.changelog.layout import POINTS, own_table_uri
from airflow_provider_pgrepl.replication.delta import recovery
from airflow_provider_pgrepl.replication.delta.log import added_action, removed_action
from airflow_provider_pgrepl.replication.delta.single_writer_log import AppLog, FencedCommitError
from airflow_provider_pgrepl.replication.delta.table import create_delta, open_delta, write_file
from airflow_provider_pgrepl.replication.lake.delta.live_files import app_version
from airflow_provider_pgrepl.replication.lake.delta.ownership import lake_mark, read_apps, reason_of_lake
from airflow_provider_pgrepl.replication.lake.delta.table import read_position
from airflow_provider_pgrepl.replication.lake.history.table import history_key
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import (
    open_storage,
    parse_parquet,
    read_file,
    storage_error,
    storage_errors,
)

_BY_TABLE = pa.map_(pa.string(), pa.int64())
SCHEMA = pa.schema(
    [
        ("epoch", pa.int64()),
        ("lsn", pa.int64()),
        ("commit_ts", pa.timestamp("us", "UTC")),
        ("tables", _BY_TABLE),
        ("positions", _BY_TABLE),
    ]
)
CHECKPOINT_EVERY = 100
_TABLE_PROPERTIES = {
    "delta.checkpointInterval": str(CHECKPOINT_EVERY),
    "delta.enableExpiredLogCleanup": "false",
    # Only `epoch` has bounds in every file. Readers would assume that another indexed column never matches.
    "delta.dataSkippingStatsColumns": "epoch",
}
__all__ = [
    "POINTS_APP",
    "SCHEMA",
    "ConsistentPoint",
    "ConsistentPoints",
    "TablePosition",
    "points_uri",
    "read_table_position",
]
POINTS_APP = "pgrepl-points"
"""Delta app ID of the process that writes points. Its version counts the commits."""
# Opening the points reads every file of their table.
_MANY_FILES = 64
# Maintenance thins the points in two commits, and pgrepl maintain may do so at the same time.
_ATTEMPTS = 5
_OPERATION = "WRITE"


@dataclass(frozen=True)
class ConsistentPoint:
    """A position of the source, and the versions of the lake tables that hold exactly the commits up to it.

    Every transaction that committed at or before `lsn` of `epoch` is in each of `tables`, at the given
    version. The keys are `str(TableName)`. `commit_ts` is the source's time of the last commit, or of the
    snapshot's export if no commit followed it.

    `positions` are the positions of the tables themselves when the point was written. A table whose position
    is lower now was reverted. Points of earlier versions of this package have no positions.
    """

    epoch: int
    lsn: int
    commit_ts: datetime | None
    tables: dict[str, int]
    positions: dict[str, int] = field(default_factory=dict)

    @property
    def order(self) -> tuple[int, int]:
        return self.epoch, self.lsn


_FIELDS = {known.name for known in fields(ConsistentPoint)}


def create(uri: str) -> DeltaTable:
    """Create the table of consistent points without rows, and return it."""
    create_delta(uri, SCHEMA, _TABLE_PROPERTIES)
    return open_delta(uri)


def upgrade(table: DeltaTable) -> None:
    """Add the columns that a table created by an earlier version lacks, in a commit without data."""
    held = {one.name for one in table.schema().fields}
    lacking = [one for one in Schema.from_arrow(SCHEMA).fields if one.name not in held]
    if lacking:
        table.alter.add_columns(lacking)


def read_points(uri: str) -> tuple[DeltaTable | None, list[str], list[ConsistentPoint]]:
    """Return the table (None if it does not exist), the paths of its files, and all points in order.

    Raises LakeError if a file is damaged or lost, LakeUnavailableError.
    """
    table = _open(uri)
    while table is not None:
        try:
            return table, *_read_files(uri, table)
        except FileNotFoundError as error:
            read, table = table, _open(uri)
            # Maintenance may have deleted a file that a newer version of the table has replaced.
            if table is not None and table.version() == read.version():
                raise own_tables.damaged(uri, POINTS, f"the file {error} is not there") from None
    return None, [], []


def _open(uri: str) -> DeltaTable | None:
    try:
        return open_delta(uri)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise own_tables.unreadable(uri, POINTS, error) from None


def _read_files(uri: str, table: DeltaTable) -> tuple[list[str], list[ConsistentPoint]]:
    added = pa.table(table.get_add_actions()).sort_by([("modification_time", "ascending")])
    points: list[tuple[datetime, int, ConsistentPoint]] = []
    paths: list[str] = added["path"].to_pylist()
    for path, written_at in zip(paths, added["modification_time"].to_pylist(), strict=True):
        found = list(map(_point, read_rows(uri, path)))
        versions = sum(found[0].tables.values()) if found else 0
        points.extend((written_at, versions, point) for point in found)
    # Points at the same LSN are ordered by the time at which they were written; within one millisecond, by
    # the sum of their table versions. The sort is stable, so points of one file keep their order.
    points.sort(key=lambda place: (place[2].order, *place[:2]))
    return paths, [point for _, _, point in points]


def read_rows(uri: str, path: str) -> list[dict[str, Any]]:
    """Return the rows of one file of points.

    Raises FileNotFoundError, whose only argument is the path; LakeError if the file is damaged;
    LakeUnavailableError.
    """
    content = None
    with storage_errors(uri, "read"), suppress(FileNotFoundError):
        filesystem, root = open_storage(uri)
        content = read_file(filesystem, f"{root}/{path}")
    if content is None:
        raise FileNotFoundError(path)
    try:
        rows: list[dict[str, Any]] = parse_parquet(content).to_pylist()
    except ValueError:
        raise own_tables.damaged(uri, POINTS, f"the file {path} is damaged") from None
    return rows


def _point(row: dict[str, Any]) -> ConsistentPoint:
    by_table = {name: dict(row.get(name) or ()) for name in ("tables", "positions")}
    return ConsistentPoint(**{**{name: row[name] for name in row.keys() & _FIELDS}, **by_table})


def write_points(uri: str, points: Sequence[ConsistentPoint]) -> AddAction:
    """Write a file with these points, and return its add action for a commit."""
    by_table = [
        {name: list(getattr(point, name).items()) for name in ("tables", "positions")} for point in points
    ]
    rows = [{**vars(point), **maps} for point, maps in zip(points, by_table, strict=True)]
    first, last = points[0], points[-1]
    bounds = {
        "minValues": {"epoch": first.epoch},
        "maxValues": {"epoch": last.epoch},
        "nullCount": {"epoch": 0, "lsn": 0},
    }
    with storage_errors(uri):
        return write_file(uri, pa.Table.from_pylist(rows, SCHEMA), bounds)


def find_torn_points(lake_root: str) -> recovery.LogDamage:
    """Return the torn commits of points that a crash of the host left. The next batch writes a new point.

    Raises LakeError, also if a file of a point may only be invisible at present; LakeUnavailableError.
    """
    return recovery.find_torn_by_crash(points_uri(lake_root), POINTS_APP, _is_whole)


def _is_whole(actions: recovery.Actions) -> bool:
    """Return True if the actions of a commit are complete, as far as they show.

    A commit of points ends with its app ID. A compaction by another program ends with the file that it adds.
    """
    kinds = {kind for action in actions for kind in action}
    operations = {action["commitInfo"].get("operation") for action in actions if "commitInfo" in action}
    is_of_others = not operations <= {_OPERATION}
    return bool(kinds & {"txn", "metaData"}) or (is_of_others and ("add" in kinds or "remove" not in kinds))


def points_uri(lake_root: str) -> str:
    """Return the URI of the Delta table of the lake's consistent points."""
    return own_table_uri(lake_root, POINTS)


class ConsistentPoints:
    """The consistent points of one lake. Can be used from several threads.

    An instance reads the table once: create a new one to see points that others have written since. Only one
    instance of all processes may append. If it finds points that another instance appended, it raises
    FencedError. Another instance may thin the points.
    """

    def __init__(self, lake_root: str) -> None:
        self._root, self._uri = lake_root, points_uri(lake_root)
        self._lock = threading.RLock()
        self._table: DeltaTable | None = None
        self._log: AppLog | None = None
        self._files: list[str] = []
        self._points: list[ConsistentPoint] | None = None
        self._marks: Sequence[Transaction] | None = None

    def all(self) -> Sequence[ConsistentPoint]:
        """Return every kept point, oldest first. Empty without points. Raises LakeError."""
        return tuple(self._loaded())

    def latest(self) -> ConsistentPoint | None:
        """Return the newest point of the newest epoch, or None without points. Raises LakeError."""
        points = self._loaded()
        return points[-1] if points else None

    def at_or_before(self, lsn: int, epoch: int | None = None) -> ConsistentPoint | None:
        """Return the newest kept point at or before `lsn` in `epoch`, or None if there is none.

        Without `epoch`, the newest epoch is searched. Raises LakeError.
        """
        points = self._loaded()
        if not points:
            return None
        wanted = points[-1].epoch if epoch is None else epoch
        index = bisect_right(points, (wanted, lsn), key=lambda point: point.order)
        return points[index - 1] if index and points[index - 1].epoch == wanted else None

    def last_of(self, table: TableName, epoch: int) -> ConsistentPoint | None:
        """Return the newest kept point of `epoch` that names the table, or None if there is none.

        Searches backward from the newest point and stops at the first one of another epoch. Raises LakeError,
        also if the points are those of another lake: they are wrong for this one.
        """
        self.check_lake()
        key = str(table)
        for point in reversed(self._loaded()):
            if point.epoch != epoch:
                return None
            if key in point.tables:
                return point
        return None

    def kept_versions(self) -> dict[str, set[int]]:
        """Return, for each table, the versions that kept points name. Raises LakeError."""
        versions: defaultdict[str, set[int]] = defaultdict(set)
        for point in self.all():
            for table, version in point.tables.items():
                versions[table].add(version)
        return dict(versions)

    def append(self, point: ConsistentPoint) -> None:
        """Append a point. Does nothing if it equals the last one.

        Raises LakeError if it is before the last one, or if the lake has had a table of points that is not
        there now. Raises FencedError if another process appends points, or if other commits came first in
        every attempt.
        """
        with self._lock:
            points = self._loaded()
            if points and point.order < points[-1].order:
                raise LakeError(
                    f"a consistent point at {LSN(point.lsn)} of epoch {point.epoch} is before the last one,"
                    f" at {LSN(points[-1].lsn)} of epoch {points[-1].epoch}",
                    "check whether another process writes to the lake, or part of the lake was"
                    " restored from a copy",
                )
            if points and point == points[-1]:
                return
            last = points[-1] if points else None
            for attempt in range(_ATTEMPTS):
                try:
                    self._add(point)
                    return
                except FencedError:
                    self._forget()
                    if (latest := self.latest()) == point:
                        return
                    # If the last point is as before, only thinnings came first, so this process is still the
                    # only one that appends.
                    if latest != last or attempt == _ATTEMPTS - 1:
                        raise

    def thin(self, now: datetime, keep_all_h: float, thin_min: float, keep_h: float) -> int:
        """Delete points by age, and return the number of deleted points.

        Keeps every point of the last `keep_all_h` hours. Of older ones, up to `keep_h` hours, keeps the last
        of each `thin_min` minutes. Always keeps the latest point. Makes one commit, or none if nothing is
        deleted. Raises LakeError; FencedError if other commits came first in every attempt.
        """
        return self.rewrite(lambda points: list(_thinned(points, now, keep_all_h, thin_min, keep_h)))

    def disown(self, table: TableName, epoch: int, position: int, version: int) -> None:
        """Remove a reverted table, and its history, from the points of `epoch` that no longer hold for it.

        These are the points that saw the table beyond `position`, or, if they have no position of it, beyond
        `version`. Points that name no table any more are deleted. Makes one commit, or none if nothing
        changes. Raises what `thin` does.
        """
        key, both = str(table), {str(table), history_key(table)}

        def without(point: ConsistentPoint) -> ConsistentPoint:
            seen = point.positions.get(key)
            is_there = point.tables.get(key, -1) <= version if seen is None else seen <= position
            if point.epoch != epoch or is_there:
                return point
            return replace(point, tables=_less(point.tables, both), positions=_less(point.positions, both))

        self.rewrite(lambda points: [point for point in map(without, points) if point.tables])

    def rewrite(self, change: Callable[[list[ConsistentPoint]], list[ConsistentPoint]]) -> int:
        """Replace the points by those that `change` returns for them, and return by how many fewer they are.

        `change` is called again if another process commits first. Makes no commit if nothing changes. Raises
        what `thin` does.
        """
        with self._lock:
            for attempt in range(_ATTEMPTS):
                points = self._loaded()
                kept = change(points)
                if kept == points:
                    break
                try:
                    self._write(kept, replaces=True)
                except FencedError:
                    self._forget()
                    if attempt == _ATTEMPTS - 1:
                        raise
                    continue
                self._points = kept
                break
            return len(points) - len(kept)

    def _add(self, point: ConsistentPoint) -> None:
        points = self._loaded()
        if len(self._files) >= _MANY_FILES:
            self._write([*points, point], replaces=True)
        else:
            self._write([point])
        points.append(point)

    def _forget(self) -> None:
        self._log = self._points = self._marks = None

    def _loaded(self) -> list[ConsistentPoint]:
        with self._lock:
            if self._points is None:
                self._table, self._files, self._points = read_points(self._uri)
            return self._points

    def _write(self, points: Sequence[ConsistentPoint], *, replaces: bool = False) -> None:
        """Commit one file with these points, in addition to the existing files or in place of all of them."""
        gone = self._files if replaces else []
        try:
            self._log = self._log or self._open_log()
            written = [write_points(self._uri, points)] if points else []
            actions = [*map(removed_action, gone), *map(added_action, written)]
            self._log.commit(_OPERATION, actions, apps=self._missing_marks())
        except FencedCommitError:
            raise _fenced() from None
        except LakeUnavailableError:
            self._forget()
            raise
        except (DeltaError, OSError) as error:
            self._forget()
            raise storage_error("the consistent points cannot be written", error) from error
        self._marks = ()
        kept = [] if replaces else self._files
        self._files = [*kept, *(file.path for file in written)]

    def check_lake(self) -> None:
        """Raise LakeError if these are the points of another lake."""
        self._loaded()
        self._missing_marks()

    def _missing_marks(self) -> Sequence[Transaction]:
        """Return the mark of the lake for the next commit; empty if the table of points already has it.

        Raises LakeError if the table has the mark of another lake.
        """
        with self._lock:
            if self._marks is None:
                mark = lake_mark(self._root)
                known = None if mark is None or self._table is None else self._table.transaction_version(mark)
                if known is None and self._table is not None:
                    # Check only in this case, because the check reads the log once more.
                    self._check_marks()
                self._marks = [Transaction(mark, 1)] if mark is not None and known is None else ()
            return self._marks

    def _check_marks(self) -> None:
        reason = reason_of_lake(self._uri, read_apps(self._uri))
        if reason is not None:
            raise LakeError(
                f"the consistent points in {self._uri} are not those of this lake: {reason}. Nothing was"
                " changed",
                "move that folder away, and bring back the one of this lake. Only if that is lost for good,"
                " give it up: pgrepl accept-missing FILE.json prints what is lost, and with --yes gives it"
                " up",
            )

    def _open_log(self) -> AppLog:
        self._missing_marks()
        table = self._table or self._create()
        upgrade(table)
        return AppLog(self._uri, table, POINTS_APP, CHECKPOINT_EVERY, knows_files=True)

    def _create(self) -> DeltaTable:
        own_tables.check(self._root)
        table = create(self._uri)
        with suppress(NoChangelogError):
            own_tables.record(self._root)
        return table


def _thinned(
    points: Sequence[ConsistentPoint], now: datetime, keep_all_h: float, thin_min: float, keep_h: float
) -> Iterable[ConsistentPoint]:
    newest_of_slot: dict[tuple[int, float], int] = {}
    keep: set[int] = {len(points) - 1} if points else set()
    known = now
    for index in reversed(range(len(points))):
        # A point without a time counts as being as old as the next newer one.
        known = points[index].commit_ts or known
        age = now - known
        if age <= timedelta(hours=keep_all_h):
            keep.add(index)
        elif age <= timedelta(hours=keep_h):
            slot = (points[index].epoch, known.timestamp() // (thin_min * 60))
            newest_of_slot.setdefault(slot, index)
    keep.update(newest_of_slot.values())
    return (points[index] for index in sorted(keep))


def _less(by_table: dict[str, int], keys: Collection[str]) -> dict[str, int]:
    return {key: value for key, value in by_table.items() if key not in keys}


def _fenced() -> FencedError:
    return FencedError(
        "another process writes this lake's consistent points; this one stops",
        "only one replication app may run for a lake",
    )


@dataclass(frozen=True)
class TablePosition:
    """The position of a lake table.

    `own`: the position that the table stores. Every change up to `whole` is in the table. `version`: the
    newest version of the table. `known`: a version that this pipeline is known to have written, or None.
    `seen`: the later position at which a consistent point recorded the table if it was reverted since,
    otherwise None.
    """

    own: LSN
    whole: LSN
    version: int
    known: int | None = None
    seen: LSN | None = None

    def problem(self, copied: LSN, floor: LSN, durable: LSN) -> PgReplError | None:
        """Return the error if the table cannot continue from the changelog, otherwise None.

        `copied`: the position of the table's last copy. The changelog has changes above `floor` and up to
        `durable`.
        """
        text = ""
        if self.own < copied:
            text = f"the lake table is at {self.own}, before its last copy at {copied}: it was reverted"
        elif self.own > max(durable, copied):
            text = f"the lake table is at {self.own}, but the changelog goes up to {durable} only"
        elif self.whole > max(durable, copied):
            text = (
                f"by a consistent point in _pgrepl/consistent_points the table is whole up to {self.whole},"
                f" but the changelog goes up to {durable} only: are the points those of this lake?"
            )
        if text:
            return LakeChangedError(text)
        if self.whole >= floor:
            return None
        text = f"the table is at {self.whole}, but the changelog holds changes above {floor} only"
        return ChangelogError(text)


def read_table_position(
    table: DeltaTable, app: str, key: str, point: ConsistentPoint | None
) -> TablePosition | None:
    """Return the position of a table, or None if this epoch never wrote the table. Raises FencedError.

    `point`: the newest consistent point of the epoch that names the table by `key`, None without one.
    """
    own, version = read_position(table, app), int(table.version())
    if own is None:
        return None
    if point is None:
        return TablePosition(own, own, version)
    named, seen = point.tables.get(key), _seen(point, key, table, app)
    if seen is None or own < seen:
        return TablePosition(own, own, version, seen=LSN(own + 1) if seen is None else seen)
    known = named if named is not None and named <= version else None
    return TablePosition(own, max(own, LSN(point.lsn)), version, known)


def _seen(point: ConsistentPoint, key: str, table: DeltaTable, app: str) -> LSN | None:
    """Return the position at which the point recorded the table, or None if the table does not have the
    version that the point names."""
    if key in point.positions:
        return LSN(point.positions[key])
    # A point of an earlier version of this package has no positions. Read the position from the version that
    # the point names.
    try:
        found = app_version(open_delta(table.table_uri, point.tables[key]), app)
    except (DeltaError, OSError, LakeTableError):
        return None
    return None if found is None or found > point.lsn else LSN(found)
