"""When a table is merged: as soon as it wishes, as long as the lake is not written too much for it. Pure.

What a merge writes does not follow what has changed alone: a commit has its line in the log, a vector is
written whole. Merged less often, the same changes write less. So a table's merges have a budget, and one that
is over it waits for more changes, up to a limit.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

WINDOW_S = 3600.0
"""Over how long a table's budget is kept."""
FREE_BYTES_PER_S = 256 << 10
"""What any table may write, however little changes: a small one that is rewritten each second takes that."""

_SLOT_S = 60.0
_BYTES_PER_S = 32 << 20
"""What a merge takes at first guess, in bytes of changes."""

Reason = Literal["", "freshness", "write_amplification"]


@dataclass(frozen=True)
class Cadence:
    """What is chosen for a table: how late its changes may be at best and at worst, in seconds; and how many
    bytes may be written for a byte of change."""

    freshness_s: float
    max_staleness_s: float
    write_amplification: float


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
        self._started: float | None = None
        self.seconds: float | None = None
        self._last_written = 0
        self.ended: float | None = None
        self.share = 1.0
        """Of the bytes of the files in which the table has changes, that of its own, as of the last merge."""

    def start(self, now: float) -> None:
        """A merge begins."""
        self._started = now

    def end(self, now: float, seconds: float, written: int, changed: int, listed: int = 0) -> None:
        """It has ended: what it took, and the bytes that it wrote for so many bytes of changes, which lay in
        files of so many bytes, beside those of other tables."""
        if listed:
            self.share = min(1.0, changed / listed)
        if not self._slots or now - self._slots[-1].began >= _SLOT_S:
            self._slots.append(_Slot(now))
        while now - self._slots[0].began > WINDOW_S:
            self._slots.popleft()
        self._slots[-1].written += written
        self._slots[-1].changed += changed
        self.seconds, self._last_written, self.ended = seconds, written, now

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
        if self._is_within(cadence, changed, now):
            return Turn(at_best, "freshness")
        return Turn(min(at_worst, max(at_best, now + cadence.freshness_s)), "write_amplification")

    def _is_within(self, cadence: Cadence, changed: int, now: float) -> bool:
        """Whether a merge that writes as much as the last one keeps to the budget."""
        if not self._slots:
            return True
        free = FREE_BYTES_PER_S * (now - self._slots[0].began + _SLOT_S)
        allowed = cadence.write_amplification * (self.changed + changed) + free
        return self.written + self._last_written <= allowed
