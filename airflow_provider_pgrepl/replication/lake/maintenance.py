"""Maintenance of a lake: deletes what is no longer needed, and compacts the changelog's small files.

Deletes old consistent points, expired changelog hours, and files and log entries that no kept point and no
reader needs.

Consistent points are also thinned out when the table versions that they name take too many bytes. A table
that is merged every second gets a version every second, each of which may be a copy of most of it. Readers
lose little with a deleted point: they read the older point and apply the changelog on top of it. A reader may
have opened a version whose points were deleted a short time ago. Such versions are read from the log of the
points' table, since any process may maintain the lake.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError, PgReplError
from airflow_provider_pgrepl.replication.changelog.layout import system_folder
from airflow_provider_pgrepl.replication.changelog.maintenance import compact_closed_hours, drop_expired
from airflow_provider_pgrepl.replication.lake.delta.ownership import NOT_MARKED
from airflow_provider_pgrepl.replication.lake.delta.vacuum import TableFiles
from airflow_provider_pgrepl.replication.lake.history.table import is_history, path_of
from airflow_provider_pgrepl.replication.lake.snapshot import kept_ranges
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.progress import TableBytes
from airflow_provider_pgrepl.replication.storage import (
    commit_version,
    log_path,
    open_storage,
    read_commit_actions,
    storage_errors,
)
from airflow_provider_pgrepl.replication.storage.probe import storage_lead

from .consistent_points import ConsistentPoint, ConsistentPoints, points_uri, read_rows

RECENT = timedelta(minutes=1)
"""Age up to which the newest point of every minute is kept, whatever the budget."""
LEAST_BUDGET = 8 << 20
"""Bytes that every table may have in versions that only points keep. To delete less is not worth a commit."""

_RECENT_SPACING = timedelta(minutes=1)

Fits = Callable[[Sequence[ConsistentPoint]], bool]
log = logging.getLogger(__name__)
GRACE = timedelta(minutes=15)
"""The time for which a removed file is kept, for readers that opened a version that has it."""
CHANGELOG_GRACE = timedelta(hours=3)
"""The same for the changelog: longer than a planned merge may wait before it reads its files."""
ORPHAN_AGE = timedelta(days=7)
"""The age from which a file that no commit names is deleted as a dead writer's: no snapshot takes longer."""
HOLD = timedelta(minutes=2)
"""The minimum time for which removed files, and versions of deleted points, are kept beyond the budget."""
LOG_AGE = timedelta(hours=1)
"""The minimum age of a deleted log entry, for handles that were opened long ago."""
VersionsForPoints = Mapping[str, Collection[int]]
"""By path below the lake root, the versions that a consistent point which is not written yet may name."""
# Processes that commit write a checkpoint every 100 commits of a table, and every 200 of the changelog.
# Maintenance writes one, after this many commits, only if they did not.
_TABLE_CHECKPOINT, _CHANGELOG_CHECKPOINT = 200, 400
_CHANGELOG, _POINTS, _COPIES = "_pgrepl/changelog", "_pgrepl/consistent_points", "_pgrepl/copies"
_PUBLISHERS, _SEQUENCES = "_pgrepl/publishers", "_pgrepl/sequences"
_NO_POINTS = (
    "there is no consistent point, or it cannot be read. So the versions that points keep are unknown, and no"
    " file of a lake table was deleted. The replication app writes the first point after its first batch"
)
_PATH_SEGMENT = re.compile(r"[A-Za-z0-9~-][A-Za-z0-9~_.-]*")


def budget(live_bytes: int, factor: float) -> int:
    """Return the bytes that a table may take in addition to its newest version."""
    return max(LEAST_BUDGET, int(live_bytes * factor))


def left_for_points(budget: int, held: int) -> int:
    """Return the bytes of a budget that points may keep: at least a quarter of it.

    `held`: the bytes that were replaced during the last hold, which readers may still use. It is subtracted
    twice, as about the same amount is added before the files released now can be deleted.
    """
    return max(budget - 2 * held, budget // 4)


def within_budget(
    points: Sequence[ConsistentPoint], now: datetime, fits: Fits, keep: timedelta
) -> list[ConsistentPoint]:
    """Return the points, oldest first, at the finest even spacing at which `fits` accepts them.

    `keep`: the time for which points are kept. The spacing never exceeds half of it, even if the points do
    not fit then. A point serves only reads of later positions, so without old points no table could be read
    as of an earlier time.
    """
    kept = list(points)
    for spacing in _spacings(keep):
        if fits(kept):
            break
        kept = _spaced(points, now, spacing)
    return kept


def _spacings(keep: timedelta) -> Iterable[timedelta]:
    """Return spacings from about a minute to half of `keep`.

    Each is twice the one before, so that points which one spacing keeps are also kept by the finer ones.
    """
    finest = 0
    while keep / 2 ** (finest + 2) >= _RECENT_SPACING:
        finest += 1
    return (keep / 2 ** (halvings + 1) for halvings in range(finest, -1, -1))


def versions_by_path(points: Iterable[ConsistentPoint]) -> dict[str, set[int]]:
    """Return, for each lake table, the versions that these points name. Keys: paths below the lake root."""
    versions: dict[str, set[int]] = {}
    for point in points:
        for key, version in point.tables.items():
            versions.setdefault(path_of(key), set()).add(version)
    return versions


def _spaced(points: Sequence[ConsistentPoint], now: datetime, spacing: timedelta) -> list[ConsistentPoint]:
    """Return the newest point, the newest of each recent minute, and the oldest of each earlier interval.

    The oldest point of an interval is not replaced by later ones, so it is kept until it expires. If the
    newest point is later than `now`, ages are counted from it.
    """
    kept: dict[object, ConsistentPoint] = {}
    if points:
        now = max(now, points[-1].commit_ts or now)
    for point, time in _dated(points, now):
        if not kept or now - time <= RECENT:
            kept.setdefault(
                ("recent", point.epoch, time.timestamp() // _RECENT_SPACING.total_seconds()), point
            )
        else:
            kept[point.epoch, time.timestamp() // spacing.total_seconds()] = point
    return list(reversed(kept.values()))


def _dated(points: Sequence[ConsistentPoint], now: datetime) -> Iterable[tuple[ConsistentPoint, datetime]]:
    """Yield the points and their times, newest first. A point without a time has that of the next newer one.

    No time is after `now`. Times are from the source's clock: if it was ahead, all points written then would
    count as recent until this host's clock reaches them.
    """
    known = now
    for point in reversed(points):
        known = min(now, point.commit_ts or known)
        yield point, known


def released_versions(lake_root: str, since: datetime) -> dict[str, set[int]]:
    """Return, by table path, the versions that points named in files of points replaced since `since`.

    These include versions that a kept point still names. Raises LakeError, LakeUnavailableError.
    """
    versions: dict[str, set[int]] = {}
    uri = points_uri(lake_root)
    filesystem, root = open_storage(uri)
    with storage_errors(root, "read"):
        for path in _replaced_files(filesystem, root, since):
            for key, version in _named(uri, path):
                versions.setdefault(path_of(key), set()).add(version)
    return versions


def _replaced_files(filesystem: fs.FileSystem, root: str, since: datetime) -> Iterator[str]:
    """Yield the paths of the files of points that commits since `since` removed.

    The time of a commit is the modification time of its log file, by the storage's clock.
    """
    for info in filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True)):
        version = commit_version(info.base_name)
        if version is not None and info.mtime >= since:
            actions = _read(filesystem, root, version)
            yield from (action["remove"]["path"] for action in actions if "remove" in action)


def _read(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    try:
        return read_commit_actions(filesystem, root, version)
    except FileNotFoundError:
        return []  # Another process cleaned the log. Such a commit is older than the hold of a version.
    except ValueError:
        raise LakeError(f"commit {version} of the consistent points cannot be read") from None


def _named(uri: str, path: str) -> Iterator[tuple[str, int]]:
    try:
        rows = read_rows(uri, path)
    except FileNotFoundError:
        return  # Maintenance has deleted the file, which it does only after the hold of a version.
    for row in rows:
        yield from row["tables"] or ()


@dataclass
class MaintenanceResult:
    """The result of one run: the numbers of deleted points, files and log entries, and the failures.

    `changelog_files`: files removed with their expired hours. `compacted_files`: files compacted into others
    with the same rows. `failed`: by path, the error of a table or folder that could not be maintained.
    `left_alone`: by path, why a folder was deliberately not maintained.
    """

    points: int = 0
    changelog_files: int = 0
    compacted_files: int = 0
    files: int = 0
    log_entries: int = 0
    failed: dict[str, PgReplError] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)


class Maintenance:
    """The maintenance of one pipeline's lake.

    Keep the instance between runs: it remembers what it has read of each table's log. Can run while the
    receiver and the applier write.

    `versions_for_points`: returns the versions to keep for later points, or None if they are not known. Then
    no file and no log entry of a lake table is deleted.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        grace: timedelta = GRACE,
        changelog_grace: timedelta = CHANGELOG_GRACE,
        orphan_age: timedelta = ORPHAN_AGE,
        log_age: timedelta = LOG_AGE,
        hold: timedelta = HOLD,
        versions_for_points: Callable[[], VersionsForPoints | None] = dict,
    ) -> None:
        self._pipeline = pipeline
        self._grace, self._orphan_age, self._log_age = grace, orphan_age, log_age
        self._changelog_grace = changelog_grace
        self._files: dict[str, TableFiles] = {}
        self._hold = hold
        self._versions_for_points = versions_for_points
        self._lead: timedelta | None = None
        self._left_alone: dict[str, str] = {}

    def run(
        self,
        now: datetime | None = None,
        *,
        needed_above: Mapping[int, int] | None = None,
        needed_later: Sequence[tuple[float, Mapping[int, int]]] = (),
        reader_version: int | None = None,
    ) -> MaintenanceResult:
        """Thin the points, then delete changelog hours, files and log entries that are no longer needed.

        A failure at one table or folder does not stop the others. It is logged and is in the result.

        :param needed_above: as in `drop_expired`; without it the changelog keeps all its hours
        :param needed_later: pairs of a retention in hours, longer than `changelog_retention_h`, and the
            positions needed then, as in `needed_above`: fewer tables still have a right to such old hours
        :param reader_version: the changelog version that the slowest reader of versions has read; without it
            no file and no log entry of the changelog is deleted
        """
        now = now or self._now(look=True)
        done = MaintenanceResult(left_alone=self._left_alone)
        with _isolated_failures(_POINTS, done):
            self._maintain_tables(done, now)
        if needed_above is not None:
            own = (self._pipeline.changelog_retention_h, needed_above)
            for hours, needed in (own, *needed_later):
                with _isolated_failures(_CHANGELOG, done):
                    dropped = drop_expired(self._pipeline.lake_root, hours, needed, now)
                    done.changelog_files += dropped.files
        with _isolated_failures(_CHANGELOG, done):
            done.compacted_files = compact_closed_hours(self._pipeline.lake_root, now).files
        if reader_version is not None:
            with _isolated_failures(_CHANGELOG, done):
                self._maintain_changelog(reader_version, done, now)
        with _isolated_failures(_COPIES, done):
            kept_ranges.expire(self._pipeline.lake_root, now - self._orphan_age)
        log.info(
            "maintenance deleted %d consistent points, %d changelog files from the file list, %d"
            " files and %d log entries; it compacted %d changelog files",
            *(done.points, done.changelog_files, done.files, done.log_entries, done.compacted_files),
        )
        return done

    def keep_budget(self, now: datetime | None = None) -> MaintenanceResult:
        """Maintain only the tables whose removed files take more than their budget. For use between runs.

        Looks for newer commits of each table, and reads them.
        """
        done = MaintenanceResult()
        with _isolated_failures(_POINTS, done):
            self._maintain_tables(done, now or self._now(), only_over=True)
        return done

    def measure(self) -> dict[str, TableBytes]:
        """Return the bytes of each lake table as of the last run. Keys: paths below the lake root."""
        return {path: files.measured for path, files in self._files.items() if not path.startswith("_")}

    def _maintain_tables(self, done: MaintenanceResult, now: datetime, *, only_over: bool = False) -> None:
        paths = self._own_paths(done, only_known=only_over)
        paths = [path for path in paths if self._is_readable(path, done)]
        if only_over:
            paths = [path for path in paths if self._is_over(path, now)]
            if not paths:
                return
        # Ask before the points are read: a version that gets its point in between is found in the points. A
        # version that is replaced after `now` is kept by its age.
        later = self._versions_for_points()
        kept = self._thin(done, now)
        if kept or not paths:
            self._left_alone.pop(_POINTS, None)
        else:
            self._leave_alone(_POINTS, _NO_POINTS)
        if kept and later is not None:
            for path in paths:
                with _isolated_failures(path, done):
                    self._maintain(path, {*kept.get(path, ()), *later.get(path, ())}, done, now)
        if not only_over and kept:
            self._maintain(_POINTS, (), done, now)
        if not only_over:
            for path in self._other_own_paths(done):
                with _isolated_failures(path, done):
                    self._maintain(path, (), done, now)

    def _thin(self, done: MaintenanceResult, now: datetime) -> Mapping[str, Collection[int]]:
        """Delete points by age and by budget, and return, by table path, the versions that are still needed.

        Empty only if there are no points. They may only be invisible at present, so the versions that they
        name are unknown then.
        """
        settings = self._pipeline
        # Read the points again each time: a file that a point needs must not be deleted because this process
        # has not read the point.
        points = ConsistentPoints(settings.lake_root)
        if not points.all():
            return {}
        # Thinning writes, which fails if the storage is full. Unneeded files can be deleted all the same.
        with _isolated_failures(_POINTS, done):
            done.points = points.thin(
                now,
                settings.consistent_point_keep_all_h,
                settings.consistent_point_thinning_min,
                settings.consistent_point_retention_h,
            )
            # The time for which thinning keeps points: `consistent_point_keep_all_h` may be the longer one.
            keep = timedelta(
                hours=max(settings.consistent_point_retention_h, settings.consistent_point_keep_all_h)
            )
            done.points += points.rewrite(
                lambda points: within_budget(points, now, lambda kept: self._fits(kept, now), keep)
            )
        needed = versions_by_path(points.all())
        for path, versions in released_versions(settings.lake_root, now - self._hold).items():
            needed.setdefault(path, set()).update(versions)
        return needed

    def _now(self, *, look: bool = False) -> datetime:
        """Return the time, minus how far this host's clock was ahead of the storage's clock in the last run.

        `look`: measure the difference again.
        """
        now = datetime.now(UTC)
        if look or self._lead is None:
            self._lead = storage_lead(system_folder(self._pipeline.lake_root), now)
        return now - self._lead

    def _fits(self, points: Sequence[ConsistentPoint], now: datetime) -> bool:
        """Return True if, for each table, the versions that only these points keep are within its budget."""
        held_since = now - self._hold
        return all(
            self._files_of(path).bytes_of(versions, held_since)
            <= left_for_points(self._budget(path), self._files_of(path).bytes_since(held_since))
            for path, versions in versions_by_path(points).items()
            if path in self._files and not is_history(path)
        )

    def _is_readable(self, path: str, done: MaintenanceResult) -> bool:
        with _isolated_failures(path, done):
            self._files_of(path).measure()
        return path not in done.failed

    def _budget(self, path: str) -> int:
        return budget(self._files_of(path).measured.live, self._pipeline.consistent_point_bytes)

    def _is_over(self, path: str, now: datetime) -> bool:
        """Return True if the removed files of a table exceed its budget, or will before more can be deleted.

        Assumes that during the next hold as many bytes are removed as during the last one.
        """
        coming = self._files_of(path).bytes_since(now - self._hold)
        return self._files_of(path).measured.kept + coming > self._budget(path)

    def _maintain(self, path: str, kept: Collection[int], done: MaintenanceResult, now: datetime) -> None:
        files = self._files_of(path)
        # A reader that follows a history commit by commit may be as far behind as the oldest point.
        unread = (
            timedelta(hours=self._pipeline.consistent_point_retention_h) if is_history(path) else timedelta(0)
        )
        grace, log_age = self._grace, self._log_age
        if self._is_over(path, now):
            grace, log_age = min(grace, self._hold), min(log_age, grace)
        grace, log_age = max(grace, unread), max(log_age, unread)
        if path == _POINTS:
            # The next run, of any process, reads in these files which versions were released in between.
            grace, log_age = max(grace, self._hold), max(log_age, self._hold)
        if path == _SEQUENCES:
            # Its versions belong to points, of which every one is kept for this time.
            kept_all = timedelta(hours=self._pipeline.consistent_point_keep_all_h)
            grace, log_age = max(self._grace, kept_all), max(self._log_age, kept_all)
        done.files += files.vacuum(kept, now, grace=grace, orphan_age=self._orphan_age)
        files.checkpoint(_TABLE_CHECKPOINT)
        if files.foreign is not None and not path.startswith("_"):
            # Keep the log: it shows that not all of the table was written by the pipeline.
            reason = f"version {files.foreign.version} was written by another program"
            self._leave_alone(f"{path}/_delta_log", f"{reason} ({files.foreign.operation})")
            return
        self._left_alone.pop(f"{path}/_delta_log", None)
        done.log_entries += files.clean_log(min(kept, default=None), now, age=log_age)

    def _maintain_changelog(self, reader_version: int, done: MaintenanceResult, now: datetime) -> None:
        files, grace = self._files_of(_CHANGELOG), self._changelog_grace
        done.files += files.vacuum(
            (), now, grace=grace, orphan_age=self._orphan_age, unread_after=reader_version
        )
        files.checkpoint(_CHANGELOG_CHECKPOINT)
        # A process that starts later reads in the log which files were removed, and when.
        done.log_entries += files.clean_log(reader_version, now, age=max(self._log_age, grace))

    def _files_of(self, path: str) -> TableFiles:
        if path not in self._files:
            self._files[path] = TableFiles(f"{self._pipeline.lake_root}/{path}")
        return self._files[path]

    def _table_paths(self, done: MaintenanceResult) -> list[str]:
        """Return the path `<schema>/<table>` of every Delta table below the lake root, in a point or not."""
        filesystem, root = open_storage(self._pipeline.lake_root)
        with storage_errors(self._pipeline.lake_root):
            schemas = _folders(filesystem, root)
        paths: list[str] = []
        for schema in schemas:
            with _isolated_failures(schema, done), storage_errors(f"{self._pipeline.lake_root}/{schema}"):
                paths += (f"{schema}/{table}" for table in _folders(filesystem, f"{root}/{schema}"))
        return [path for path in paths if self._is_table(path, done)]

    def _own_paths(self, done: MaintenanceResult, *, only_known: bool) -> list[str]:
        """Return the paths of the tables that this pipeline wrote: only in their folders is anything deleted.

        Records in `left_alone` why each of the others is not maintained. `only_known`: leave out the tables
        recorded there by an earlier run.
        """
        own: list[str] = []
        named: Collection[str] | None = None
        for path in self._table_paths(done):
            if only_known and path in self._left_alone:
                continue
            with _isolated_failures(path, done):
                files = self._files_of(path)
                reason = files.reason_to_leave(self._pipeline.name)
                if reason is None and not files.is_marked:
                    if named is None:
                        named = versions_by_path(ConsistentPoints(self._pipeline.lake_root).all())
                    reason = None if path in named or not named else NOT_MARKED
                if reason is None:
                    own.append(path)
                    self._left_alone.pop(path, None)
                    continue
                self._files.pop(path)
                self._leave_alone(path, reason)
        return own

    def _leave_alone(self, path: str, reason: str) -> None:
        if self._left_alone.get(path) != reason:
            log.warning("%s is left alone by maintenance: %s", path, reason)
            self._left_alone[path] = reason

    def _other_own_paths(self, done: MaintenanceResult) -> list[str]:
        """Return the paths of the Delta tables of sequences, and of publishers' positions, that exist."""
        filesystem, root = open_storage(self._pipeline.lake_root)
        names: list[str] = []
        with (
            _isolated_failures(_PUBLISHERS, done),
            storage_errors(f"{self._pipeline.lake_root}/{_PUBLISHERS}"),
        ):
            names = _folders(filesystem, f"{root}/{_PUBLISHERS}")
        paths = (f"{_PUBLISHERS}/{name}" for name in names)
        return [path for path in (_SEQUENCES, *paths) if self._is_table(path, done)]

    def _is_table(self, path: str, done: MaintenanceResult) -> bool:
        filesystem, root = open_storage(self._pipeline.lake_root)
        kind = fs.FileType.NotFound
        with _isolated_failures(path, done), storage_errors(f"{self._pipeline.lake_root}/{path}"):
            kind = filesystem.get_file_info(log_path(f"{root}/{path}")).type
        return bool(kind == fs.FileType.Directory)


def _folders(filesystem: fs.FileSystem, root: str) -> list[str]:
    """Return the names, sorted, of the folders in `root` whose names this package may have given.

    This leaves out `lost+found`, at the root of a file system, which only an administrator can read.
    """
    infos = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    names = [info.base_name for info in infos if info.type == fs.FileType.Directory]
    return sorted(name for name in names if _PATH_SEGMENT.fullmatch(name))


@contextmanager
def _isolated_failures(place: str, done: MaintenanceResult) -> Iterator[None]:
    try:
        yield
    except PgReplError as error:
        log.warning("maintenance of %s failed: %s", place, error)
        done.failed[place] = error
