"""Selection of the consistent points to keep when the table versions that they name take too many bytes.

A table that is merged every second gets a version every second, each of which may be a copy of most of it.
Readers lose little with a deleted point: they read the older point and apply the changelog on top of it.

This module also finds table versions whose consistent points were deleted a short time ago. A reader may have
opened such a version. They are read from the log of the points' table, since any process may maintain the
lake.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from typing import Any

from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, points_uri, read_rows
from airflow_provider_pgrepl.replication.lake.history.table import path_of
from airflow_provider_pgrepl.replication.storage import (
    commit_version,
    log_path,
    open_storage,
    read_commit_actions,
    storage_errors,
)

RECENT = timedelta(minutes=1)
"""Age up to which the newest point of every minute is kept, whatever the budget."""
LEAST_BUDGET = 8 << 20
"""Bytes that every table may have in versions that only points keep. To delete less is not worth a commit."""

_RECENT_SPACING = timedelta(minutes=1)

Fits = Callable[[Sequence[ConsistentPoint]], bool]


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
