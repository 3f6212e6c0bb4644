"""When a table is merged: as soon as it wishes, as long as the lake is not written too much for it. Pure.

What a merge writes does not follow what has changed alone: a commit has its line in the log, a vector is
written whole. Merged less often, the same changes write less. So a table's merges have two budgets, for what
they write and for what they leave behind, and one that is over either waits for more changes, up to a limit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from airflow_provider_pgrepl.replication.lake.apply.merge_task import SHARE_S, MergeJob, Share, make_shares
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult

WINDOW_S = 3600.0
"""Over how long a table's budget is kept."""
FREE_BYTES_PER_S = 256 << 10
"""What any table may write, however little changes: a small one that is rewritten each second takes that."""

REPLACED_S = 150.0
"""So long what merges have replaced stays in the storage: for readers, and until maintenance comes by."""

_SLOT_S = 60.0
_FREE_REPLACED = 16 << 20
_SMOOTHED_S = 600.0
_WRITTEN_OF_CHANGES = 0.5
"""Of their values' bytes: compressed to a sixth, written, and written again as small files are joined."""
_LEAST_SPACING_S = 0.5
_BYTES_PER_S = 32 << 20
"""What a merge takes at first guess, in bytes of changes."""

Reason = Literal["", "freshness", "write_amplification", "points_bytes"]
_LONG_S = 1.0
_LEAST_S = 0.005
_SHORT_ONES_COME_S = 60.0
"""So long after a short merge one slot is not given to long ones."""


@dataclass(frozen=True)
class Cadence:
    """What is chosen for a table: how late its changes may be at best and at worst, in seconds; how many
    bytes may be written for a byte of change; and how many may lie beside a byte of the newest version."""

    freshness_s: float
    max_staleness_s: float
    write_amplification: float
    points_bytes: float


@dataclass(frozen=True)
class Turn:
    """When a table's changes are to be merged, by the monotonic clock, and what they wait for until then."""

    at: float
    reason: Reason = ""


@dataclass
class _Slot:
    began: float
    written: int = 0
    changed: int = 0


class TablePace:
    """What the merges of one table have taken lately."""

    def __init__(self) -> None:
        self._slots: deque[_Slot] = deque()
        self._replaced: deque[tuple[float, int]] = deque()
        self._live = 0
        self._started: float | None = None
        self.seconds: float | None = None
        self._last_written = 0
        self.share = 1.0
        """Of the bytes of the files in which the table has changes, that of its own, as of the last merge."""

    def start(self, now: float) -> None:
        """A merge begins."""
        self._started = now

    def end(
        self, now: float, seconds: float, written: int, changed: int, *, listed: int = 0, live: int = 0
    ) -> None:
        """It has ended: what it took, and the bytes that it wrote for so many bytes of changes, which lay in
        files of so many bytes, beside those of other tables. So many bytes the table has now (0: unknown)."""
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
        """How long a merge of so many bytes of changes takes, as far as one can tell."""
        guess = changed / _BYTES_PER_S
        return guess if self.seconds is None else max(self.seconds, guess)

    @property
    def written(self) -> int:
        """Bytes, in the last hour."""
        return sum(slot.written for slot in self._slots)

    @property
    def changed(self) -> int:
        """Bytes of changes, in the last hour."""
        return sum(slot.changed for slot in self._slots)

    def turn(self, cadence: Cadence, waiting_since: float, changed: int, now: float) -> Turn:
        """When the changes are to be merged that wait since then, of so many bytes."""
        at_best = 0.0 if self._started is None else self._started + cadence.freshness_s
        at_worst = max(at_best, waiting_since + cadence.max_staleness_s)
        if not self._is_within(cadence, changed, now):
            return Turn(min(at_worst, max(at_best, now + cadence.freshness_s)), "write_amplification")
        excess = self._excess(cadence, now)
        if excess <= 1 or self._started is None:
            return Turn(at_best, "freshness")
        # Squared, as a vector that is written less often marks more.
        spaced = self._started + max(cadence.freshness_s, _LEAST_SPACING_S) * excess**2
        return Turn(min(at_worst, spaced), "points_bytes")

    def _replace(self, now: float, written: int, changed: int, live: int) -> None:
        """What was written and has not made the table larger took the place of something. What is written of
        the changes themselves does so however seldom they are merged."""
        if self._live:
            replaced = written - (live - self._live) - round(changed * _WRITTEN_OF_CHANGES)
            self._replaced.append((now, max(0, replaced)))
        self._live = live

    def _excess(self, cadence: Cadence, now: float) -> float:
        """What was replaced lately, in what may be: a third of what may lie beside the table, as consistent
        points need most of it."""
        while self._replaced and now - self._replaced[0][0] > _SMOOTHED_S:
            self._replaced.popleft()
        if not self._replaced:
            return 0.0
        allowed = max(_FREE_REPLACED, self._live * cadence.points_bytes / 3)
        known_s = max(REPLACED_S, now - self._replaced[0][0])
        return sum(size for _, size in self._replaced) * REPLACED_S / known_s / allowed

    def _is_within(self, cadence: Cadence, changed: int, now: float) -> bool:
        """Whether a merge that writes as much as the last one keeps to the budget."""
        if not self._slots:
            return True
        free = FREE_BYTES_PER_S * (now - self._slots[0].began + _SLOT_S)
        allowed = cadence.write_amplification * (self.changed + changed) + free
        return self.written + self._last_written <= allowed


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
