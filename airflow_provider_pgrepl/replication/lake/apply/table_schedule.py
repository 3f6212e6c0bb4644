"""The merge schedule: which changes wait for which table, and which table is merged next. Uses neither Spark
nor storage.

Each table is in one of three states. It has caught up with a version of the changelog, and newer changes
wait. Or a merge of it is running. Or it lags: its merge is planned again from the changelog's live files.

CaughtUpTables holds the known states of tables that have caught up. It only avoids reads of the lake. Each
table is merged at its own pace. A consistent point needs the states of all tables at one version of the
changelog. Earlier states of a table are therefore kept until a consistent point has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.lake.history.table import history_key, path_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.progress import TableMerges

from .merge_policy import MergePolicy, MergeStatistics, MergeTime
from .merge_task import MergeJob
from .work_item import BatchEnd, BatchEnds, WorkItem

BEFORE_ALL = -1
_AGAIN_S = 0.2
"""Seconds before a failed table is tried again. The process that caused the failure may need that time to
record it."""


@dataclass(frozen=True)
class PendingFiles:
    """Files with changes of one table that are merged together. `since`: when the first was received
    (monotonic clock, in seconds).

    `through`: the version of the changelog at which it ends, None while files can still be added.
    `is_overflow`: the files exceed the limit of one merge, and are not listed here.
    """

    paths: tuple[str, ...]
    bytes: int
    since: float
    through: int | None = None
    is_overflow: bool = False

    def with_more(self, other: PendingFiles, limit: int) -> PendingFiles:
        """Return this portion extended by the later one. If both together exceed `limit` bytes, it is an
        overflow."""
        size = self.bytes + other.bytes
        if self.is_overflow or other.is_overflow or (self.bytes and size > limit):
            return replace(self, paths=(), bytes=size, through=other.through, is_overflow=True)
        return replace(self, paths=self.paths + other.paths, bytes=size, through=other.through)


class PendingChanges:
    """The changes that wait for one table: portions in the order received. Only the last one can still
    grow."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._portions: deque[PendingFiles] = deque()

    @property
    def first(self) -> PendingFiles:
        """The portion to merge next."""
        return self._portions[0]

    @property
    def bytes(self) -> int:
        """Bytes of all portions."""
        return sum(portion.bytes for portion in self._portions)

    def add(self, portion: PendingFiles) -> None:
        """Append a portion, or extend the last one if it is not sealed."""
        if self._portions and self._portions[-1].through is None:
            portion = self._portions.pop().with_more(portion, self._limit)
        self._portions.append(portion)

    def seal(self, through: int) -> None:
        """End the last portion at version `through` of the changelog: later changes are merged separately."""
        if self._portions[-1].through is None:
            self._portions[-1] = replace(self._portions[-1], through=through)

    def take(self) -> bool:
        """Remove the first portion, whose merge starts. Return True if none is left."""
        self._portions.popleft()
        return not self._portions


@dataclass(frozen=True)
class CaughtUpTable:
    """The state of a table that has caught up with the changelog.

    `snapshot`: the position of its last copy. It was merged at version `since` of the changelog, and has no
    change from there up to version `through`. `version`, `position`: those of the lake table.
    `history_version`: that of its history, None if it has no history. `fingerprint`: of the commits of these
    versions.
    """

    snapshot: LSN
    since: int
    through: int
    version: int
    position: int
    history_version: int | None
    fingerprint: str


class CaughtUpTables(dict[int, CaughtUpTable]):
    """The newest state of each table by relation id, and earlier states."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[int, list[CaughtUpTable]] = {}
        self._next_look = 0.0

    def forget(self, oid: int) -> None:
        """Remove all states of a table."""
        self.pop(oid, None)
        self._earlier.pop(oid, None)

    def forget_others(self, snapshots: Mapping[int, LSN]) -> list[int]:
        """Remove the tables that are not in `snapshots`, or have another snapshot there. Return their
        relation ids."""
        others = [oid for oid, known in self.items() if snapshots.get(oid) != known.snapshot]
        for oid in others:
            self.forget(oid)
        return others

    def add(self, oid: int, caught_up: CaughtUpTable) -> None:
        """Set the newest state of a table. The previous one is kept as an earlier state."""
        if (before := self.get(oid)) is not None:
            self._earlier.setdefault(oid, []).append(before)
        self[oid] = caught_up

    def extend(self, oid: int, through: int) -> None:
        """Record that the table has no change up to version `through`."""
        if (known := self.get(oid)) is not None and known.through < through:
            self[oid] = replace(known, through=through)

    def at(self, oid: int, version: int) -> CaughtUpTable | None:
        """Return the state of a table at a version of the changelog, or None if no kept state is valid for
        exactly that version."""
        return next((known for known in self._versions(oid) if known.since <= version <= known.through), None)

    def versions_for_points(self, tables: Mapping[int, TableName]) -> dict[str, set[int]]:
        """Return the versions that a later consistent point may name, by path below the lake root.

        These are all kept states of these tables, and of their histories.
        """
        versions: dict[str, set[int]] = {}
        for oid, table in tables.items():
            for known in self._versions(oid):
                for key, version in versions_of({table: known}).items():
                    versions.setdefault(path_of(key), set()).add(version)
        return versions

    def common(self, oids: Collection[int], newest: int) -> int | None:
        """Return the newest version of the changelog, at most `newest`, for which a state of each table is
        kept, or None if there is none."""
        version, is_common = newest, False
        while not is_common:
            is_common = True
            for oid in oids:
                reached = (min(known.through, version) for known in self._versions(oid, version))
                nearest = next(reached, None)
                if nearest is None:
                    return None
                is_common = is_common and nearest == version
                version = nearest
        return version

    def forget_before(self, version: int, spans: Collection[tuple[int, int]] | None = None) -> None:
        """Remove the earlier states that end before `version`. If `spans` are given, also remove those that
        overlap none of them.

        Each span is a first and a last version. The newest state of each table is always kept.
        """
        for oid, earlier in list(self._earlier.items()):
            self._earlier[oid] = [
                known
                for known in earlier
                if known.through >= version
                and (
                    spans is None
                    or any(known.since <= last and first <= known.through for first, last in spans)
                )
            ]
            if not self._earlier[oid]:
                del self._earlier[oid]

    def look(
        self, oids: Collection[int], fingerprint: Callable[[int, CaughtUpTable], str], every_s: float
    ) -> Iterator[int]:
        """Yield the tables whose fingerprint is not the recorded one, after removing their states.

        Does nothing if the last check was less than `every_s` seconds ago.
        """
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + every_s
        for oid in oids:
            known = self.get(oid)
            if known is not None and fingerprint(oid, known) != known.fingerprint:
                self.forget(oid)
                yield oid

    def _versions(self, oid: int, begun_at: int | None = None) -> Iterator[CaughtUpTable]:
        """Yield the states of a table, newest first. With `begun_at`, only those whose `since` is not after
        that version."""
        known = self.get(oid)
        if known is None:
            return
        for one in (known, *reversed(self._earlier.get(oid, ()))):
            if begun_at is None or one.since <= begun_at:
                yield one


def versions_of(tables: Mapping[TableName, CaughtUpTable]) -> dict[str, int]:
    """Return the versions of the tables and of their histories, by the keys that a consistent point uses."""
    versions = {str(table): known.version for table, known in tables.items()}
    histories = {
        history_key(table): known.history_version
        for table, known in tables.items()
        if known.history_version is not None
    }
    return versions | histories


class TableSchedule:
    """The schedule of all tables, by relation id.

    `newest`: the version of the changelog at which the last batch ended. `boundary`: the version at which the
    waiting changes were last sealed. No merge of waiting changes crosses it.
    """

    def __init__(self, cadence: Callable[[int], MergePolicy], limit: int) -> None:
        self._cadence = cadence
        self._limit = limit
        self.newest = self.boundary = BEFORE_ALL
        self.ends = BatchEnds()
        self.caught_up = CaughtUpTables()
        self.waiting: dict[int, PendingChanges] = {}
        self.running: dict[int, MergeJob] = {}
        self.paces: dict[int, MergeStatistics] = {}
        self._again_at: dict[int, float] = {}

    def add(self, end: BatchEnd, begin: int, items: Iterable[WorkItem], now: float) -> None:
        """Add the items of a batch that starts after version `begin` of the changelog and ends at `end`.

        A batch that was received before is ignored. If it does not follow the last one, all tables are
        planned again.
        """
        if begin != BEFORE_ALL and end.version <= self.newest:
            return
        if begin == BEFORE_ALL or begin != self.newest:
            self._forget_all()
        for item in items:
            if self._is_followed(item.relation_id):
                waiting = self.waiting.setdefault(item.relation_id, PendingChanges(self._limit))
                # A file holds changes of several tables, so estimate this table's part.
                size = int(item.bytes * self.pace(item.relation_id).share)
                waiting.add(PendingFiles(item.paths, size, now))
        self.newest = end.version
        self.ends.add(end)
        for oid in self.caught_up:
            self._extend(oid)

    def follow(self, streaming: Mapping[int, LSN], catching_up: Mapping[int, LSN]) -> None:
        """Restrict the schedule to these tables, each with the position of its last copy.

        Other states are removed, and so are waiting changes of tables that are not followed. A running merge
        of another table, or of an older copy, leaves its table lagging. A planned merge of a table that is
        catching up can still complete its catch-up.
        """
        self.caught_up.forget_others(streaming)
        for oid, job in list(self.running.items()):
            is_there = streaming.get(oid) == job.snapshot
            if not is_there and not (job.is_planned and catching_up.get(oid) == job.snapshot):
                self.running[oid] = replace(job, is_last=False)
        for oid in [oid for oid in self.waiting if not self._is_followed(oid)]:
            del self.waiting[oid]

    def lagging(self, oids: Iterable[int], now: float) -> list[int]:
        """Return the tables whose merges have to be planned from the changelog: without a running merge or a
        delay after a failure, and either without a known state or with more waiting changes than one merge
        can take."""
        return [
            oid
            for oid in oids
            if oid not in self.running
            and (oid not in self.caught_up or self._overflows(oid))
            and now >= self._again_at.get(oid, now)
        ]

    def turns(self, now: float) -> dict[int, MergeTime]:
        """Return when the waiting changes of each caught-up table are to be merged: changes up to a boundary
        now, others at the table's own pace."""
        return {
            oid: self._turn(oid, waiting, now)
            for oid, waiting in self.waiting.items()
            if oid in self.caught_up and oid not in self.running and not waiting.first.is_overflow
        }

    def seal(self) -> None:
        """Set a boundary at the newest version. Merges end there, so that a consistent point can contain all
        tables."""
        self.boundary = self.newest
        for waiting in self.waiting.values():
            waiting.seal(self.newest)

    def is_passing(self, oids: Iterable[int], passed: int) -> bool:
        """Return True if the boundary is after version `passed`, and each table is at it or will still get
        there.

        A lagging table makes it False: its next state is after the boundary.
        """
        return self.boundary > passed and all(
            self.caught_up.at(oid, self.boundary) is not None
            or (oid in self.caught_up and self.caught_up[oid].through < self.boundary)
            for oid in oids
        )

    def pace(self, oid: int) -> MergeStatistics:
        """Return the statistics of the table's merges."""
        return self.paces.setdefault(oid, MergeStatistics())

    def next_of(self, oid: int) -> tuple[PendingFiles, int]:
        """Return the portion to merge next, and the version of the changelog that the table has caught up
        with afterwards."""
        first = self.waiting[oid].first
        return first, self.newest if first.through is None else first.through

    def start(self, oid: int, job: MergeJob, now: float) -> None:
        """Record that a merge starts. A planned one covers all waiting changes of the table, any other one
        the first portion."""
        self.running[oid] = job
        self.pace(oid).start(now)
        if job.is_planned:
            self.waiting.pop(oid, None)
        elif self.waiting[oid].take():
            del self.waiting[oid]

    def finish(self, oid: int, caught_up: CaughtUpTable | None, failed_at: float | None = None) -> None:
        """Record that a merge has ended. `caught_up`: the new state of the table, None if it still lags.

        `failed_at`: the time of a failure (monotonic clock). The table is not planned again for `_AGAIN_S`
        seconds.
        """
        del self.running[oid]
        self._again_at.pop(oid, None)
        if failed_at is not None:
            self._again_at[oid] = failed_at + _AGAIN_S
        if caught_up is None:
            self.caught_up.forget(oid)
            self.waiting.pop(oid, None)
        else:
            self.caught_up.add(oid, caught_up)
            self._extend(oid)

    def is_settled(self, oids: Collection[int]) -> bool:
        """Return True if no merge is running, and all these tables have caught up with everything
        received."""
        return not self.running and all(oid in self.caught_up and oid not in self.waiting for oid in oids)

    def through(self, oids: Iterable[int]) -> int:
        """Return the version of the changelog that all these tables have caught up with, or BEFORE_ALL if one
        lags."""
        known = [self.caught_up.get(oid) for oid in oids]
        return min((BEFORE_ALL if one is None else one.through for one in known), default=self.newest)

    def common(self, oids: Collection[int]) -> int | None:
        """Return the newest version of the changelog at which a consistent point of these tables can be made.

        Returns None if there is none, also when the batch end of the common version has been dropped. That
        happens if a table that did not have that version has since stopped or been paused.
        """
        version = self.caught_up.common(oids, self.newest)
        return version if version in self.ends else None

    def merges(self, oid: int, now: float) -> TableMerges | None:
        """Return the merge statistics of a table for `pgrepl status`, or None if it has not been merged
        yet."""
        pace, waiting = self.paces.get(oid), self.waiting.get(oid)
        if pace is None or pace.seconds is None:
            return None
        made = TableMerges(round(pace.seconds, 3), pace.written, pace.changed)
        if waiting is None:
            return made
        turn = self._turn(oid, waiting, now)
        waits_for = turn.reason if turn.at > now and turn.reason != "freshness" else ""
        return replace(made, waiting_s=round(now - waiting.first.since, 1), waits_for=waits_for)

    def forget_before(self, version: int, needed: Iterable[int]) -> None:
        """Remove states and batch ends that no later consistent point can use. `version`: that of the last
        consistent point.

        Points before `version` are not made any more, nor points before the next state of a `needed` table
        that lags. While a needed table has waiting changes or a running merge, earlier states are kept only
        for the versions of its current state, of the end of a running merge, and of the boundary.
        """
        first, spans = version, [(self.boundary, self.boundary)]
        is_held = False
        for oid in needed:
            job, known = self.running.get(oid), self.caught_up.get(oid)
            if job is not None and job.is_last:
                spans.append((job.through, job.through))
            if known is None:
                first = max(first, self.newest if job is None or not job.is_last else job.through)
            elif job is not None or oid in self.waiting:
                spans.append((known.since, known.through))
                is_held = True
        self.caught_up.forget_before(first, spans if is_held else None)
        self.ends.forget_before(first)

    def _turn(self, oid: int, waiting: PendingChanges, now: float) -> MergeTime:
        if waiting.first.through is not None:
            return MergeTime(now)
        return self.pace(oid).turn(self._cadence(oid), waiting.first.since, waiting.bytes, now)

    def _forget_all(self) -> None:
        """Remove all states, waiting changes and batch ends, because a batch does not follow the last one.
        All tables then lag."""
        for oid in list(self.caught_up):
            self.caught_up.forget(oid)
        self.waiting.clear()
        self.ends.clear()
        self.boundary = BEFORE_ALL
        self.running = {oid: replace(job, is_last=False) for oid, job in self.running.items()}

    def _is_followed(self, oid: int) -> bool:
        """Return True if new changes of the table have to be kept for it. A table that lags finds them in the
        changelog when it is planned."""
        job = self.running.get(oid)
        return oid in self.caught_up if job is None else job.is_last

    def _overflows(self, oid: int) -> bool:
        return oid in self.waiting and self.waiting[oid].first.is_overflow

    def _extend(self, oid: int) -> None:
        if oid not in self.waiting and oid not in self.running:
            self.caught_up.extend(oid, self.newest)
