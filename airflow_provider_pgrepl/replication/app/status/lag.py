"""The lag of the lake behind the source's WAL, from what a running process holds in memory."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime

from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress

_SAMPLES = 120


class LagMeter:
    """The lag behind ends of the WAL that `add_end` gets, and behind what was received since.

    One thread adds ends. Any thread may read the lag.
    """

    def __init__(
        self, received: Callable[[], ReceiverProgress], applied: Callable[[], ApplierProgress]
    ) -> None:
        self._received = received
        self._applied = applied
        self._ends: deque[tuple[float, LSN]] = deque(maxlen=_SAMPLES)

    def add_end(self, at: float, end: LSN) -> None:
        """Add the end of the source's WAL, read at the time `at` (monotonic clock)."""
        self._ends.append((at, end))

    def shown(self) -> LSN:
        """Return the LSN before which the lake shows everything that committed.

        It advances also without a new consistent point, if nothing was committed for the lake's tables.
        """
        seen, version = self._received().seen_lsn, self._received().changelog_version
        applied = self._applied()
        # The applied LSN is inclusive: the WAL's end is the byte after it.
        points = LSN(applied.applied_lsn + 1)
        return max(points, seen) if applied.caught_up and applied.version >= version else points

    def age(self) -> float | None:
        """Return the age in seconds of the last transaction in the lake.

        It is less if the source has written none since then: the time since its WAL ended at or before what
        the lake shows.
        """
        shown, applied = self.shown(), self._applied()
        ages = [time.monotonic() - at for at, end in tuple(self._ends) if end <= shown]
        if applied.commit_ts is not None:
            ages.append((datetime.now(UTC) - applied.commit_ts).total_seconds())
        return max(0.0, min(ages)) if ages else None

    def now(self) -> tuple[float | None, int | None]:
        """Return the lag in seconds and in bytes of WAL, behind the newest end that is known.

        Returns None for both while the lake has no consistent point, and 0 if the lake shows everything up to
        that end.
        """
        if not self._applied().applied_lsn:
            return None, None
        ends = tuple(self._ends)
        end = max(self._received().received_lsn, ends[-1][1] if ends else LSN(0))
        behind = max(0, end - self.shown())
        return (self.age() if behind else 0.0), behind
