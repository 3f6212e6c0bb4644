"""The lag of a running replication, and its summary once a minute, as a log line and as data."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.runtime.process_io import leave_result
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.server import read_commit_clock, wal_lsn
from airflow_provider_pgrepl.replication.source.slot import read_slot, read_wal_limit
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.tables import TableState
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)
_METERED_ENDS = 120
"""The readings of the WAL's end from which the lag is computed."""
INTERVAL_S = 60.0
_NAMED = 20
_ANSWER_S, _POLL_S = 5.0, 0.1
_KEPT_ENDS = 60
"""The readings in which the WAL's end is looked up that the lake shows: with a larger lag none is known."""


class LagMeter:
    """The lag behind ends of the WAL that `add_end` gets, and behind what was received since.

    One thread adds ends. Any thread may read the lag.
    """

    def __init__(
        self, received: Callable[[], ReceiverProgress], applied: Callable[[], ApplierProgress]
    ) -> None:
        self._received = received
        self._applied = applied
        self._ends: deque[tuple[float, LSN]] = deque(maxlen=_METERED_ENDS)

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


@dataclass(frozen=True)
class Summary:
    """The state of a replication.

    `changes`: changes received since the last summary. `applied`: rows applied since the start. There is no
    lag while the lake has no consistent point. Values for which the source could not be asked are None.
    `errors`: class, reason and hint of each errored table, by its name.
    """

    states: Mapping[TableState, int]
    errors: Mapping[str, Mapping[str, str]]
    changes: int
    seconds: float
    applied: int
    applied_lsn: LSN = LSN(0)  # noqa: RUF009 - immutable
    lag_s: float | None = None
    lag_bytes: int | None = None
    held_bytes: int | None = None
    has_lake_tables: bool = True

    @property
    def errored(self) -> tuple[str, ...]:
        """The names of the errored tables, in order."""
        return tuple(sorted(self.errors))

    def to_text(self) -> str:
        return "; ".join([self._tables(), self._changes(), self._lag()])

    def to_dict(self) -> dict[str, Any]:
        """Return the summary in JSON types, small enough for XCom."""
        named = self.errored[:_NAMED]
        return {
            "tables": sum(self.states.values()),
            "rows": self.applied,
            "lsn": str(self.applied_lsn) if self.applied_lsn else None,
            "states": {state.value: count for state, count in self.states.items() if count},
            "errored": list(named),
            "errors": {table: self.errors[table] for table in named},
            "changes_per_s": round(self.changes / max(self.seconds, 0.001), 1),
            "lag_s": None if self.lag_s is None else round(self.lag_s, 1),
            "lag_bytes": self.lag_bytes,
            "wal_held_bytes": self.held_bytes,
        }

    def _tables(self) -> str:
        states = ", ".join(self._count(state) for state, count in self.states.items() if count)
        return f"{sum(self.states.values())} tables: {states or 'none'}"

    def _count(self, state: TableState) -> str:
        text = f"{self.states[state]} {state.value}"
        if state is not TableState.ERRORED or not self.errors:
            return text
        names, more = ", ".join(self.errored[:_NAMED]), len(self.errors) - _NAMED
        return f"{text} ({names}{f' and {more} more' if more > 0 else ''})"

    def _changes(self) -> str:
        rate = self.changes / max(self.seconds, 0.001)
        received = f"{self.changes:,} changes received, {rate:,.0f}/s"
        applied = f"; {self.applied:,} rows applied since the start" if self.has_lake_tables else ""
        return received + applied

    def _lag(self) -> str:
        held = f"the slot holds {show_bytes(self.held_bytes)} of WAL"
        if self.lag_bytes is not None:
            lag = "" if self.lag_s is None else f"{self.lag_s:,.1f} s, "
            what = "the lake" if self.has_lake_tables else "the changelog"
            return f"{what} is {lag}{show_bytes(self.lag_bytes)} behind the source; {held}"
        if self.held_bytes is not None and not self.has_lake_tables:
            return held
        if self.held_bytes is not None:
            return f"the lake has no consistent point yet; {held}"
        return "the source cannot be asked how far it is"


@dataclass(frozen=True)
class SourceReading:
    """The values of the source that the last summary read; None for those that it could not read.

    `at`: the time of the reading, by the monotonic clock. `complete_at`: every transaction whose commit
    record was in the WAL at that time, by the clock of the source, is in each streaming table.
    """

    at: float
    wal_lsn: LSN | None = None
    wal_retained_bytes: int | None = None
    wal_limit_bytes: int | None = None
    slot_active: bool | None = None
    lag_seconds: float | None = None
    lag_bytes: int | None = None
    complete_at: datetime | None = None


class SummaryLog:
    """A thread that logs a summary every minute from `start` to `stop`, with connections of its own.

    A summary that cannot be read stops nothing: only its error is logged.
    """

    def __init__(
        self,
        dsn: str,
        state_dsn: str,
        pipeline: Pipeline,
        received: Callable[[], ReceiverProgress],
        applied: Callable[[], ApplierProgress],
        request_keepalive: Callable[[], None],
        interval_s: float | None = None,
    ) -> None:
        self._dsn = dsn
        self._state_dsn = state_dsn
        self._pipeline = pipeline
        self._received = received
        self._applied = applied
        self._request_keepalive = request_keepalive
        self._interval_s = interval_s or INTERVAL_S
        self._stopping = threading.Event()
        self._changes = received().changes
        self._at = time.monotonic()
        self._lag = LagMeter(received, applied)
        self._ends: deque[tuple[datetime, LSN]] = deque(maxlen=_KEPT_ENDS)
        self.source: SourceReading | None = None
        """The last reading of the source, None before the first. Any thread may read it."""

    def start(self) -> None:
        """Start the thread. The first line comes after a minute."""
        threading.Thread(target=self._run, name="pgrepl-summary", daemon=True).start()

    def stop(self) -> None:
        """Log no more lines. Does not wait for a summary that is being read."""
        self._stopping.set()

    def leave(self) -> None:
        """Write the state at the end as the run's result, unless it cannot be read."""
        with suppress(PgReplError):
            leave_result(self.read().to_dict())

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                summary = self.read()
                text = summary.to_text()
                leave_result(summary.to_dict())
            except Exception as error:  # noqa: BLE001 - a summary that fails must not end what it is about
                text = f"no summary: {error if isinstance(error, PgReplError) else trace_of(error)}"
            if not self._stopping.is_set():
                log.info("%s", text)

    def read(self) -> Summary:
        """Return the present state, with the changes since the last call. Raises PgReplError."""
        role = f"summary {self._pipeline.name}"
        with StateDatabase(self._state_dsn, role) as state_db:
            records = list(state_db.read_tables(self._pipeline.name).values())
        records = [record for record in records if record.state is not TableState.REMOVED]
        reading = self._behind(role)
        self.source = reading
        now, changes = time.monotonic(), self._received().changes
        summary = Summary(
            states=dict(Counter(record.state for record in records).most_common()),
            errors={
                str(record.table): {"error": record.error, "reason": record.reason, "hint": record.hint}
                for record in records
                if record.state is TableState.ERRORED
            },
            changes=changes - self._changes,
            seconds=now - self._at,
            applied=self._applied().changes,
            applied_lsn=self._applied().applied_lsn,
            lag_s=reading.lag_seconds,
            lag_bytes=reading.lag_bytes,
            held_bytes=reading.wal_retained_bytes,
            has_lake_tables=self._pipeline.has_lake_tables,
        )
        self._changes, self._at = changes, now
        return summary

    def _behind(self, role: str) -> SourceReading:
        """Return the source's WAL, its slot, and the lag of the lake behind it."""
        try:
            with closing(connect(self._dsn, role)) as connection:
                clock = read_commit_clock(connection)
                asked, end = time.monotonic(), wal_lsn(connection)
                slot = read_slot(connection, self._pipeline.slot)
                limit = read_wal_limit(connection)
        except PgReplError:
            return SourceReading(time.monotonic())
        held = None if slot is None else slot.held_bytes(end)
        reading = SourceReading(asked, end, held, limit, slot is not None and slot.active)
        applied = self._applied()
        self._lag.add_end(asked, end)
        if clock is not None:
            self._ends.append((clock, end))
        if not applied.applied_lsn:
            return reading
        behind, age = max(0, end - self._lag.shown()), self._lag.age()
        seconds = self._until_shown(asked, end)
        lag = age if seconds is None else seconds
        return replace(reading, lag_seconds=lag, lag_bytes=behind, complete_at=self._complete_at())

    def _complete_at(self) -> datetime | None:
        """Return the newest time of the source at which its WAL ended at or before what the lake shows."""
        shown = self._lag.shown()
        return max((clock for clock, end in self._ends if end <= shown), default=None)

    def _until_shown(self, asked: float, end: LSN) -> float | None:
        """Return the seconds from reading the WAL's end until the lake shows it; None after 5 s, or when
        stopping."""
        self._request_keepalive()
        while self._lag.shown() < end:
            if time.monotonic() - asked > _ANSWER_S or self._stopping.wait(_POLL_S):
                return None
        return time.monotonic() - asked
