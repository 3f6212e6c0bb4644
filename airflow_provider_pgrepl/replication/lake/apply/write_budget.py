"""Decides when a table is merged: as early as its settings allow, while its writes to the lake stay within
budget. No I/O.

The bytes that a merge writes are not proportional to the bytes that changed: each commit adds a log entry,
and a deletion vector is written whole. Fewer merges write less for the same changes. A table's merges
therefore have two budgets: one for the bytes that they write, and one for the replaced bytes that stay in
storage. While one of them is exceeded, the next merge waits for more changes, up to a limit in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from airflow_provider_pgrepl.replication.lake.apply.merge_task import SHARE_S, MergeJob, Share, make_shares
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult

WINDOW_S = 3600.0
"""Seconds over which the write budget of a table is computed."""
FREE_BYTES_PER_S = 256 << 10
"""Bytes per second that the merges of any table may write, however little changes. A small table that is
rewritten once a second needs that."""

REPLACED_S = 150.0
"""Seconds that replaced files stay in storage: they are kept for readers, and then until the next
maintenance."""

_SLOT_S = 60.0
_FREE_REPLACED = 16 << 20
_SMOOTHED_S = 600.0
_WRITTEN_OF_CHANGES = 0.5
"""Bytes written for the changes themselves, per byte of their uncompressed values. They compress to about a
sixth, and are written again when small files are compacted."""
_LEAST_SPACING_S = 0.5
_BYTES_PER_S = 32 << 20
"""Bytes of changes that a merge is assumed to apply per second. Used for the expected duration of a merge."""

Reason = Literal["", "freshness", "max_write_amplification", "consistent_point_bytes"]
_LONG_S = 1.0
_LEAST_S = 0.005
_SHORT_ONES_COME_S = 60.0
"""Seconds after the last short merge for which one slot is not given to long merges."""


@dataclass(frozen=True)
class MergePolicy:
    """The settings that decide when a table is merged.

    `merge_interval_s`: minimum seconds between the starts of 2 merges. `max_staleness_s`: maximum seconds
    that a change waits for a budget. `max_write_amplification`: bytes that merges may write per byte of
    change. `consistent_point_bytes`: bytes that may be stored in addition to the newest version, as a
    multiple of its bytes.
    """

    merge_interval_s: float
    max_staleness_s: float
    max_write_amplification: float
    consistent_point_bytes: float


@dataclass(frozen=True)
class MergeTime:
    """The time at which a table's changes are to be merged, in seconds of the monotonic clock, and the
    setting that delays them until then."""

    at: float
    reason: Reason = ""


@dataclass
class _Slot:
    began: float
    written: int = 0
    changed: int = 0


class MergeStatistics:
    """Statistics of the recent merges of one table."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._replaced: deque[tuple[float, int]] = deque()
        self._live = 0
        self._started: float | None = None
        self.seconds: float | None = None
        self._last_written = 0
        self.share = 1.0
        """The table's part of the bytes in the changelog files of its last merge, from 0 to 1."""

    def start(self, now: float) -> None:
        """Record that a merge starts."""
        self._started = now

    def end(
        self, now: float, seconds: float, written: int, changed: int, *, listed: int = 0, live: int = 0
    ) -> None:
        """Record a merge that took `seconds`, and wrote `written` bytes for `changed` bytes of the table's
        changes.

        `listed`: bytes of the files that were read, which include changes of other tables. `live`: bytes of
        the table after the merge. For both, 0 means unknown.
        """
        if listed:
            self.share = min(1.0, changed / listed)
        if not self._slots or now - self._slots[-1].began >= _SLOT_S:
            self._slots.append(_Slot(now))
        while now - self._slots[0].began > WINDOW_S:
            self._slots.popleft()
        self._slots[-1].written += written
        self._slots[-1].changed += changed
        self.seconds, self._last_written = seconds, written
        if live:
            self._replace(now, written, changed, live)

    def expected_s(self, changed: int) -> float:
        """Return the seconds that a merge of `changed` bytes is expected to take: those of the last merge, or
        more if the bytes need longer at the assumed rate."""
        guess = changed / _BYTES_PER_S
        return guess if self.seconds is None else max(self.seconds, guess)

    @property
    def written(self) -> int:
        """Bytes that merges wrote in the last hour."""
        return sum(slot.written for slot in self._slots)

    @property
    def changed(self) -> int:
        """Bytes of changes that were merged in the last hour."""
        return sum(slot.changed for slot in self._slots)

    def turn(self, cadence: MergePolicy, waiting_since: float, changed: int, now: float) -> MergeTime:
        """Return when `changed` bytes of changes, the oldest of which has waited since `waiting_since`, are
        to be merged.

        The reason is the exceeded budget, or "freshness" if none is exceeded.
        """
        at_best = 0.0 if self._started is None else self._started + cadence.merge_interval_s
        at_worst = max(at_best, waiting_since + cadence.max_staleness_s)
        if not self._is_within(cadence, changed, now):
            return MergeTime(
                min(at_worst, max(at_best, now + cadence.merge_interval_s)), "max_write_amplification"
            )
        excess = self._excess(cadence, now)
        if excess <= 1 or self._started is None:
            return MergeTime(at_best, "freshness")
        # Squared, because a vector that is written less often also marks more rows each time.
        spaced = self._started + max(cadence.merge_interval_s, _LEAST_SPACING_S) * excess**2
        return MergeTime(min(at_worst, spaced), "consistent_point_bytes")

    def _replace(self, now: float, written: int, changed: int, live: int) -> None:
        """Record the bytes of older files that a merge replaced, and the table's new size.

        This is what was written, less the growth of the table, less an estimate for the changes themselves,
        which are written however seldom the table is merged.
        """
        if self._live:
            replaced = written - (live - self._live) - round(changed * _WRITTEN_OF_CHANGES)
            self._replaced.append((now, max(0, replaced)))
        self._live = live

    def _excess(self, cadence: MergePolicy, now: float) -> float:
        """Return the replaced bytes that are in storage on average, relative to the bytes allowed.

        Allowed are a third of the bytes that may be stored in addition to the newest version, because
        consistent points need most of the rest, but at least 16 MiB. Averaged over the last 10 minutes.
        """
        while self._replaced and now - self._replaced[0][0] > _SMOOTHED_S:
            self._replaced.popleft()
        if not self._replaced:
            return 0.0
        allowed = max(_FREE_REPLACED, self._live * cadence.consistent_point_bytes / 3)
        known_s = max(REPLACED_S, now - self._replaced[0][0])
        return sum(size for _, size in self._replaced) * REPLACED_S / known_s / allowed

    def _is_within(self, cadence: MergePolicy, changed: int, now: float) -> bool:
        """Return True if a merge that writes as much as the last one stays within the write budget."""
        if not self._slots:
            return True
        free = FREE_BYTES_PER_S * (now - self._slots[0].began + _SLOT_S)
        allowed = cadence.max_write_amplification * (self.changed + changed) + free
        return self.written + self._last_written <= allowed


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
