"""TableSchedule: which changes wait for which table, and whose turn it is. Knows no Spark and no storage.

Each table is brought forward by itself. It has caught up with a version of the changelog, and what came since
waits; or a merge of it is running; or it lags behind, and is planned anew from what the changelog holds.

CaughtUpTables: what the applier knows of tables that have caught up; it only saves looking.
Tables are merged each at its own pace. What is to be seen of all of them at one moment, each must have had a
version for; so the versions of a table are kept until a consistent point has passed them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.work_item import BatchEnd, BatchEnds, WorkItem
from airflow_provider_pgrepl.replication.lake.apply.write_budget import Cadence, TablePace, Turn
from airflow_provider_pgrepl.replication.lake.history.table import history_key
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.progress import TableMerges

BEFORE_ALL = -1
_AGAIN_S = 0.2
"""After an attempt at a table that failed: whoever made it fail needs a moment to say so."""


@dataclass(frozen=True)
class Portion:
    """Files of a table's changes, which are merged at once. `since`: when the first came (monotonic clock).

    `through`: the version of the changelog at which it ends, None while it may grow. `is_overflow`: there are
    more than fit into one merge, so that they are not kept here.
    """

    paths: tuple[str, ...]
    bytes: int
    since: float
    through: int | None = None
    is_overflow: bool = False

    def with_more(self, other: Portion, limit: int) -> Portion:
        """And what came later."""
        size = self.bytes + other.bytes
        if self.is_overflow or other.is_overflow or (self.bytes and size > limit):
            return replace(self, paths=(), bytes=size, through=other.through, is_overflow=True)
        return replace(self, paths=self.paths + other.paths, bytes=size, through=other.through)


class WaitingChanges:
    """Of one table: portions in the order in which they came, of which the last may grow."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._portions: deque[Portion] = deque()

    @property
    def first(self) -> Portion:
        """What is to be merged next."""
        return self._portions[0]

    @property
    def bytes(self) -> int:
        """Of all."""
        return sum(portion.bytes for portion in self._portions)

    def add(self, portion: Portion) -> None:
        """It has come."""
        if self._portions and self._portions[-1].through is None:
            portion = self._portions.pop().with_more(portion, self._limit)
        self._portions.append(portion)

    def seal(self, through: int) -> None:
        """What has come up to a version of the changelog is merged without what comes later."""
        if self._portions[-1].through is None:
            self._portions[-1] = replace(self._portions[-1], through=through)

    def take(self) -> bool:
        """The first is being merged; whether that was the last."""
        self._portions.popleft()
        return not self._portions


@dataclass(frozen=True)
class CaughtUpTable:
    """Of a table: taken at which snapshot; caught up with the changelog from version `since`, at which it was
    merged, up to `through`, without a change in between; at which own version and position; its history, if
    it keeps one, at which version; `fingerprint` of the commits by which it got there."""

    snapshot: LSN
    since: int
    through: int
    version: int
    position: int
    history_version: int | None
    fingerprint: str


class CaughtUpTables(dict[int, CaughtUpTable]):
    """The newest of each table, by relation id."""

    def __init__(self) -> None:
        super().__init__()
        self._earlier: dict[int, list[CaughtUpTable]] = {}
        self._next_look = 0.0

    def forget(self, oid: int) -> None:
        """Nothing is known of a table any more."""
        self.pop(oid, None)
        self._earlier.pop(oid, None)

    def forget_others(self, snapshots: Mapping[int, LSN]) -> list[int]:
        """Keep what is known of these tables, each as of this snapshot; which are forgotten."""
        others = [oid for oid, known in self.items() if snapshots.get(oid) != known.snapshot]
        for oid in others:
            self.forget(oid)
        return others

    def add(self, oid: int, caught_up: CaughtUpTable) -> None:
        """A table was merged."""
        if (before := self.get(oid)) is not None:
            self._earlier.setdefault(oid, []).append(before)
        self[oid] = caught_up

    def extend(self, oid: int, through: int) -> None:
        """Up to there the table had no change."""
        if (known := self.get(oid)) is not None and known.through < through:
            self[oid] = replace(known, through=through)

    def at(self, oid: int, version: int) -> CaughtUpTable | None:
        """What a table was at a version of the changelog; None when it never was just that."""
        return next((known for known in self._versions(oid) if known.since <= version <= known.through), None)

    def common(self, oids: Collection[int], newest: int) -> int | None:
        """The newest version of the changelog, up to `newest`, with which each of these tables has caught up
        just so; None when there is none."""
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
        """No consistent point of before this version is to come any more; nor, of what is earlier than the
        newest of each table, one outside of these spans of versions, if any are given."""
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
        """From time to time: which of these tables are not as they were left; each is forgotten."""
        if time.monotonic() < self._next_look:
            return
        self._next_look = time.monotonic() + every_s
        for oid in oids:
            known = self.get(oid)
            if known is not None and fingerprint(oid, known) != known.fingerprint:
                self.forget(oid)
                yield oid

    def _versions(self, oid: int, begun_at: int | None = None) -> Iterator[CaughtUpTable]:
        """Newest first; with `begun_at`, those that had begun at that version."""
        known = self.get(oid)
        if known is None:
            return
        for one in (known, *reversed(self._earlier.get(oid, ()))):
            if begun_at is None or one.since <= begun_at:
                yield one


def versions_of(tables: Mapping[TableName, CaughtUpTable]) -> dict[str, int]:
    """The versions of tables, and of their histories, as a consistent point names them."""
    versions = {str(table): known.version for table, known in tables.items()}
    histories = {
        history_key(table): known.history_version
        for table, known in tables.items()
        if known.history_version is not None
    }
    return versions | histories


class TableSchedule:
    """By relation id. `newest`: the version of the changelog at which the last batch ended; `boundary`: one
    that no merge went across."""

    def __init__(self, cadence: Callable[[int], Cadence], limit: int) -> None:
        self._cadence = cadence
        self._limit = limit
        self.newest = self.boundary = BEFORE_ALL
        self.ends = BatchEnds()
        self.caught_up = CaughtUpTables()
        self.waiting: dict[int, WaitingChanges] = {}
        self.running: dict[int, MergeJob] = {}
        self.paces: dict[int, TablePace] = {}
        self._again_at: dict[int, float] = {}

    def add(self, end: BatchEnd, begin: int, items: Iterable[WorkItem], now: float) -> None:
        """A batch has come, of what was committed after version `begin`."""
        if begin != BEFORE_ALL and end.version <= self.newest:
            return
        if begin == BEFORE_ALL or begin != self.newest:
            self._begin_anew()
        for item in items:
            if self._is_followed(item.relation_id):
                waiting = self.waiting.setdefault(item.relation_id, WaitingChanges(self._limit))
                # A file holds the changes of many tables.
                size = int(item.bytes * self.pace(item.relation_id).share)
                waiting.add(Portion(item.paths, size, now))
        self.newest = end.version
        self.ends.add(end)
        for oid in self.caught_up:
            self._extend(oid)

    def follow(self, streaming: Mapping[int, LSN], catching_up: Mapping[int, LSN]) -> None:
        """Only these tables are there, each as of the snapshot at this position. One that catches up is seen
        through by the merge that was planned for it; what was known of it before does not hold any more."""
        self.caught_up.forget_others(streaming)
        for oid, job in list(self.running.items()):
            is_there = streaming.get(oid) == job.snapshot
            if not is_there and not (job.is_planned and catching_up.get(oid) == job.snapshot):
                self.running[oid] = replace(job, is_last=False)
        for oid in [oid for oid in self.waiting if not self._is_followed(oid)]:
            del self.waiting[oid]

    def lagging(self, oids: Iterable[int], now: float) -> list[int]:
        """Those of these tables that are to be planned anew."""
        return [
            oid
            for oid in oids
            if oid not in self.running
            and (oid not in self.caught_up or self._overflows(oid))
            and now >= self._again_at.get(oid, now)
        ]

    def turns(self, now: float) -> dict[int, Turn]:
        """When what waits for tables is to be merged: at once up to a boundary, else at each one's pace."""
        return {
            oid: self._turn(oid, waiting, now)
            for oid, waiting in self.waiting.items()
            if oid in self.caught_up and oid not in self.running and not waiting.first.is_overflow
        }

    def seal(self) -> None:
        """Set a boundary here: no merge goes across, so that a consistent point can be made of all tables."""
        self.boundary = self.newest
        for waiting in self.waiting.values():
            waiting.seal(self.newest)

    def is_passing(self, oids: Iterable[int], passed: int) -> bool:
        """Whether these tables are still to pass the last boundary, which a consistent point has not yet
        passed; a table that lags behind will be beyond it next time it is seen."""
        return self.boundary > passed and all(
            self.caught_up.at(oid, self.boundary) is not None
            or (oid in self.caught_up and self.caught_up[oid].through < self.boundary)
            for oid in oids
        )

    def pace(self, oid: int) -> TablePace:
        """What its merges have taken."""
        return self.paces.setdefault(oid, TablePace())

    def next_of(self, oid: int) -> tuple[Portion, int]:
        """What is to be merged next for a table, and the version of the changelog that it has then."""
        first = self.waiting[oid].first
        return first, self.newest if first.through is None else first.through

    def start(self, oid: int, job: MergeJob, now: float) -> None:
        """A merge begins: of the first that waits for the table, or of all that the changelog holds."""
        self.running[oid] = job
        self.pace(oid).start(now)
        if job.is_planned:
            self.waiting.pop(oid, None)
        elif self.waiting[oid].take():
            del self.waiting[oid]

    def finish(self, oid: int, caught_up: CaughtUpTable | None, failed_at: float | None = None) -> None:
        """A merge has ended: where that has left the table, if it has caught up with the job's version;
        or it has failed."""
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
        """Whether all these tables have caught up with all that has come."""
        return not self.running and all(oid in self.caught_up and oid not in self.waiting for oid in oids)

    def through(self, oids: Iterable[int]) -> int:
        """The version of the changelog with which all these tables have caught up."""
        known = [self.caught_up.get(oid) for oid in oids]
        return min((BEFORE_ALL if one is None else one.through for one in known), default=self.newest)

    def common(self, oids: Collection[int]) -> int | None:
        """Return the newest version of the changelog that a consistent point of these tables can be made at.

        None when there is none. The end of one that they have had may be forgotten: a table that has stopped
        since, or is paused, would not have had it.
        """
        version = self.caught_up.common(oids, self.newest)
        return version if version in self.ends else None

    def merges(self, oid: int, now: float) -> TableMerges | None:
        """For people to see; None for a table that was not merged yet."""
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
        """A consistent point was made at a version: none of before is to come. Nor is one between what a
        table has that is `needed` for it and where its next merge ends."""
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

    def _turn(self, oid: int, waiting: WaitingChanges, now: float) -> Turn:
        if waiting.first.through is not None:
            return Turn(now)
        return self.pace(oid).turn(self._cadence(oid), waiting.first.since, waiting.bytes, now)

    def _begin_anew(self) -> None:
        """What comes does not follow what came: all tables are to be planned anew."""
        for oid in list(self.caught_up):
            self.caught_up.forget(oid)
        self.waiting.clear()
        self.ends.clear()
        self.boundary = BEFORE_ALL
        self.running = {oid: replace(job, is_last=False) for oid, job in self.running.items()}

    def _is_followed(self, oid: int) -> bool:
        """Whether what comes for a table has to wait for it: who is planned anew finds it by itself."""
        job = self.running.get(oid)
        return oid in self.caught_up if job is None else job.is_last

    def _overflows(self, oid: int) -> bool:
        return oid in self.waiting and self.waiting[oid].first.is_overflow

    def _extend(self, oid: int) -> None:
        if oid not in self.waiting and oid not in self.running:
            self.caught_up.extend(oid, self.newest)
