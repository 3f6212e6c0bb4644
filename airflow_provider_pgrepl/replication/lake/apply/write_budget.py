"""When a table is merged: as soon as it wishes, as long as the lake is not written too much for it. Pure.

What a merge writes does not follow what has changed alone: a commit has its line in the log, a vector is
written whole. Merged less often, the same changes write less. So a table's merges have two budgets, for what
they write and for what they leave behind, and one that is over either waits for more changes, up to a limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

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
