"""MergeLanes: which merges run beside each other, so that a long one keeps no short one waiting. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from airflow_provider_pgrepl.replication.lake.apply.merge_task import SHARE_S, MergeJob, Share, make_shares
from airflow_provider_pgrepl.replication.lake.apply.table_result import TableResult

_LONG_S = 1.0
_LEAST_S = 0.005
_SHORT_ONES_COME_S = 60.0
"""So long after a short merge one slot is not given to long ones."""


class MergeLanes:
    """Of so many `slots`, in each of which a share of merges may run, so many of these `at_once`. There may
    be fewer slots or more at any time.

    Long merges run each by itself. While there are short ones, too, they leave them a slot, if there are two.
    """

    def __init__(self, slots: int, at_once: int = 1) -> None:
        self.slots = slots
        self._at_once = at_once
        self._ready: list[MergeJob] = []
        self._running: list[Share] = []
        self._long: set[int] = set()
        self._short_at = -_SHORT_ONES_COME_S
        self._long_waits = False

    @property
    def free(self) -> int:
        """Slots in which nothing runs."""
        return max(0, self.slots - len(self._running))

    @property
    def is_busy(self) -> bool:
        """Whether anything runs."""
        return bool(self._running)

    @property
    def has_ready(self) -> bool:
        """Whether a merge waits for a slot."""
        return bool(self._ready)

    def choose(self, tables: Iterable[int], expected_s: Callable[[int], float]) -> list[int]:
        """Those of tables, the first ones first, whose merges the free slots have time for. What comes for
        the others meanwhile is then merged with what they wait for."""
        time_s = SHARE_S * self.free * self._at_once
        may_be_long = self.free and not self._long_waits
        chosen = []
        for oid in tables:
            seconds = expected_s(oid)
            if seconds >= _LONG_S and may_be_long:
                chosen.append(oid)
                may_be_long = False
            elif seconds < _LONG_S and time_s > 0:
                chosen.append(oid)
                time_s -= max(seconds, _LEAST_S)
        return chosen

    def add(self, job: MergeJob) -> None:
        """It is to run."""
        self._ready.append(job)

    def begin(self, expected_s: Callable[[MergeJob], float], now: float) -> list[Share]:
        """The shares that begin now."""
        if not self.free or not self._ready:
            return []
        if self.slots == 1:
            shares: list[Share] = [self._ready]
            self._ready, self._long_waits = [], False
        else:
            shares = self._parted(expected_s, now)
        self._running += shares
        return shares

    def _parted(self, expected_s: Callable[[MergeJob], float], now: float) -> list[Share]:
        timed = [(job, expected_s(job)) for job in self._ready]
        long = [job for job, seconds in timed if seconds >= _LONG_S]
        short = [(job, seconds) for job, seconds in timed if seconds < _LONG_S]
        if short:
            self._short_at = now
        kept = int(now - self._short_at < _SHORT_ONES_COME_S)
        # Where short ones run already, those that are ready come next there.
        for_short = int(bool(short) and len(self._running) == len(self._long))
        room = max(0, min(self.free - for_short, self.slots - kept - len(self._long)))
        alone = [[job] for job in long[:room]]
        self._long |= {job.oid for job in long[:room]}
        left = self.free - len(alone)
        # One that lags behind is always there again, and may not keep tables out that move.
        self._long_waits = any(not job.is_planned for job in long[room:])
        self._ready = [*long[room:], *(job for job, _ in short if not left)]
        return [*alone, *(make_shares(short, left) if left else [])]

    def end(self, share: Share, results: list[TableResult]) -> None:
        """A share has ended, with results of its first jobs; the others are to run still."""
        self._running = [other for other in self._running if other is not share]
        self._long -= {job.oid for job in share}
        done = {result.relation_id for result in results}
        self._ready = [*(job for job in share if job.oid not in done), *self._ready]
