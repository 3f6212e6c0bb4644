"""TableSchedule: which changes wait for which table, and whose turn it is. Knows no Spark and no storage.

Each table is brought forward by itself. It has caught up with a version of the changelog, and what came since
waits; or a merge of it is running; or it lags behind, and is planned anew from what the changelog holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from airflow_provider_pgrepl.replication.lake.apply.batch_ends import BatchEnd, BatchEnds
from airflow_provider_pgrepl.replication.lake.apply.caught_up_tables import CaughtUpTable, CaughtUpTables
from airflow_provider_pgrepl.replication.lake.apply.merge_task import MergeJob
from airflow_provider_pgrepl.replication.lake.apply.waiting_changes import Portion, WaitingChanges
from airflow_provider_pgrepl.replication.lake.apply.work_item import WorkItem
from airflow_provider_pgrepl.replication.lake.apply.write_budget import Cadence, TablePace, Turn
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.state.progress import TableMerges

BEFORE_ALL = -1
_AGAIN_S = 0.2
"""After an attempt at a table that failed: whoever made it fail needs a moment to say so."""


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
