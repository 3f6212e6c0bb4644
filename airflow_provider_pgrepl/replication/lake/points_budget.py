"""Which consistent points are kept when the versions that they name take too many bytes. Pure.

A table that is merged each second leaves as many versions, each of which may be a copy of most of it. Readers
lose little with a point: between two of them they lay the changelog over the older one.

Table versions whose consistent points were deleted a short time ago, as the log of the points' table says.
A reader may have opened such a version, and any process may maintain the lake: so the lake says it.
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
"""So long the newest point of every minute is kept, whatever it costs."""
LEAST_BUDGET = 8 << 20
"""Bytes that any table may have in versions that only points keep: less is not worth a commit."""

_RECENT_SPACING = timedelta(minutes=1)

Fits = Callable[[Sequence[ConsistentPoint]], bool]


def budget(live_bytes: int, factor: float) -> int:
    """What a table may take besides its newest version."""
    return max(LEAST_BUDGET, int(live_bytes * factor))


def left_for_points(budget: int, held: int) -> int:
    """What of a budget points may keep, when so many bytes were replaced while a version is held for readers:
    as many are there anyway, and as many come before what goes now is gone. A quarter of it at least."""
    return max(budget - 2 * held, budget // 4)


def within_budget(
    points: Sequence[ConsistentPoint], now: datetime, fits: Fits, keep: timedelta
) -> list[ConsistentPoint]:
    """The points, oldest first, at the finest even spacing at which they fit.

    Never fewer than those that divide `keep`, for which points are kept, in two: a point is of use for later
    moments only, so without old ones nothing of before could be read, of any table.
    """
    kept = list(points)
    for spacing in _spacings(keep):
        if fits(kept):
            break
        kept = _spaced(points, now, spacing)
    return kept


def _spacings(keep: timedelta) -> Iterable[timedelta]:
    """From about a minute to half of `keep`, each twice the one before: what one keeps, finer ones did."""
    finest = 0
    while keep / 2 ** (finest + 2) >= _RECENT_SPACING:
        finest += 1
    return (keep / 2 ** (halvings + 1) for halvings in range(finest, -1, -1))


def versions_by_path(points: Iterable[ConsistentPoint]) -> dict[str, set[int]]:
    """For each lake table, by its path under the root, the versions that these points name."""
    versions: dict[str, set[int]] = {}
    for point in points:
        for key, version in point.tables.items():
            versions.setdefault(path_of(key), set()).add(version)
    return versions


def _spaced(points: Sequence[ConsistentPoint], now: datetime, spacing: timedelta) -> list[ConsistentPoint]:
    """The newest of all, and of each recent minute; before that the oldest of each interval: later ones do
    not take its place, so it stays until it is too old."""
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
    """Newest first; one without a time is as old as the one after it.

    Times are the source's. By a clock that is ahead of ours, or was, all points would be recent for as long.
    """
    known = now
    for point in reversed(points):
        known = min(now, point.commit_ts or known)
        yield point, known


def released_versions(lake_root: str, since: datetime) -> dict[str, set[int]]:
    """Return, by a table's path, the versions that points named which were replaced since then.

    Versions that a kept point still names are among them. Raises LakeError, LakeUnavailableError.
    """
    versions: dict[str, set[int]] = {}
    uri = points_uri(lake_root)
    filesystem, root = open_storage(uri)
    with storage_errors(root):
        for path in _replaced_files(filesystem, root, since):
            for key, version in _named(uri, path):
                versions.setdefault(path_of(key), set()).add(version)
    return versions


def _replaced_files(filesystem: fs.FileSystem, root: str, since: datetime) -> Iterator[str]:
    """By the storage's clock, as the log's files have it."""
    for info in filesystem.get_file_info(fs.FileSelector(log_path(root), allow_not_found=True)):
        version = commit_version(info.base_name)
        if version is not None and info.mtime >= since:
            actions = _read(filesystem, root, version)
            yield from (action["remove"]["path"] for action in actions if "remove" in action)


def _read(filesystem: fs.FileSystem, root: str, version: int) -> list[dict[str, Any]]:
    try:
        return read_commit_actions(filesystem, root, version)
    except FileNotFoundError:
        return []  # Another process cleaned the log: it is older than a released version is held.
    except ValueError:
        raise LakeError(f"commit {version} of the consistent points cannot be read") from None


def _named(uri: str, path: str) -> Iterator[tuple[str, int]]:
    try:
        rows = read_rows(uri, path)
    except FileNotFoundError:
        return  # Maintenance deletes it later than a released version is held.
    for row in rows:
        yield from row["tables"] or ()
