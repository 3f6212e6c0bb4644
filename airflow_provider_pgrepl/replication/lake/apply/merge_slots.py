"""The merges that are ready and those that run, in a limited number of slots. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from airflow_provider_pgrepl.replication.lake.apply.merge_task import SHARE_S, MergeJob, Share, make_shares
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult

_LONG_S = 1.0
_LEAST_S = 0.005
_SHORT_ONES_COME_S = 60.0
"""Seconds after the last short merge for which one slot is not given to long merges."""


class MergeSlots:
    """The merges that are ready and those that run, in `slots` slots. `slots` may be changed at any time.

    Each slot runs one share of merges, and a share runs up to `at_once` merges concurrently. With more than
    one slot, each long merge has a slot of its own, and one slot is kept free of long merges while there are
    short ones.
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
        """The number of slots in which no share runs."""
        return max(0, self.slots - len(self._running))

    @property
    def is_busy(self) -> bool:
        """Return True if a share is running."""
        return bool(self._running)

    @property
    def has_ready(self) -> bool:
        """Return True if a merge is waiting for a slot."""
        return bool(self._ready)

    def choose(self, tables: Iterable[int], expected_s: Callable[[int], float]) -> list[int]:
        """Return the tables, in the given order, whose merges fit into the free slots: short ones up to the
        available time, and at most one long one.

        The other tables keep waiting, and changes that arrive until their merge starts are merged with it.
        """
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
        """Add a merge that is ready to run."""
        self._ready.append(job)

    def begin(self, expected_s: Callable[[MergeJob], float], now: float) -> list[Share]:
        """Return the shares to start now, and count them as running."""
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
        # If no share of short merges is running, reserve a free slot for one. Otherwise the ready short
        # merges can follow it in its slot.
        for_short = int(bool(short) and len(self._running) == len(self._long))
        room = max(0, min(self.free - for_short, self.slots - kept - len(self._long)))
        alone = [[job] for job in long[:room]]
        self._long |= {job.oid for job in long[:room]}
        left = self.free - len(alone)
        # A lagging table always has another merge ready. Its waiting merges must not stop `choose` from
        # choosing long merges of tables that have caught up.
        self._long_waits = any(not job.is_planned for job in long[room:])
        self._ready = [*long[room:], *(job for job, _ in short if not left)]
        return [*alone, *(make_shares(short, left) if left else [])]

    def end(self, share: Share, results: list[TableResult]) -> None:
        """Record that a share has ended. Its jobs without a result become ready again, before all others."""
        self._running = [other for other in self._running if other is not share]
        self._long -= {job.oid for job in share}
        done = {result.relation_id for result in results}
        self._ready = [*(job for job in share if job.oid not in done), *self._ready]
