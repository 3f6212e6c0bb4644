"""The health of a pipeline: a decision from its status, without I/O.

A failure needs a person now. A warning may become a failure, or may be intended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from enum import StrEnum
from typing import Any, Self

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.runtime.quantities import show_bytes, show_duration
from airflow_provider_pgrepl.replication.state.tables import TableState

from .status import AppStatus, PipelineStatus, PublisherStatus, SlotStatus, TableStatus

_START = "run PgReplicationOperator, or pgrepl replicate FILE.json; its log has the cause if it ended"
_FREE_WAL = (
    "start the replication app (pgrepl replicate FILE.json, or PgReplicationOperator); if it runs, read its"
    " log for an error or a long transaction. The slot retains WAL until the app confirms it. Do not drop the"
    " slot: every table would need a new copy"
)
_LAGS = (
    "find slow merges and waiting tables in the log of the replication app:"
    f" {errors.document('how-to/troubleshoot')}"
)


class Severity(StrEnum):
    """The severity of a problem."""

    WARNING = "warning"
    FAILURE = "failure"


class ProblemKind(StrEnum):
    """The class of a problem, for programs."""

    NOT_SET_UP = "not_set_up"
    NOT_OURS = "not_ours"
    SLOT_MISSING = "slot_missing"
    SLOT_LOST = "slot_lost"
    SLOT_DROPPED = "slot_dropped"
    SLOT_KEPT = "slot_kept"
    SLOT_INACTIVE = "slot_inactive"
    WAL_RETAINED = "wal_retained"
    NO_HEARTBEAT = "no_heartbeat"
    LAG = "lag"
    TABLE_ERRORED = "table_errored"
    TABLE_STALLED = "table_stalled"
    PUBLISHER_STOPPED = "publisher_stopped"
    REPORTED = "reported"


@dataclass(frozen=True)
class HealthLimits:
    """The values from which on a status is a problem.

    :param lag_s: seconds since the commit of the oldest change that is not in the lake; a failure
    :param wal_warning: share of the limit of retained WAL; a warning
    :param wal_failure: share of the limit of retained WAL; a failure
    :param stalled_s: seconds that a table may be copied, catch up, or wait for a merge; a failure
    :param heartbeat_s: seconds since the last report of the replication app; a failure
    :param is_continuous: an app should run all the time. If False, a slot that no app reads and a missing
        report are no problems.
    """

    lag_s: float = 300.0
    wal_warning: float = 0.5
    wal_failure: float = 0.8
    stalled_s: float = 3600.0
    heartbeat_s: float = 60.0
    is_continuous: bool = True

    def __post_init__(self) -> None:
        """Raise ConfigError for limits that cannot be meant."""
        if min(self.lag_s, self.stalled_s, self.heartbeat_s) <= 0:
            raise ConfigError("lag_s, stalled_s and heartbeat_s must be above 0", "give seconds")
        if not 0 < self.wal_warning <= self.wal_failure:
            raise ConfigError(
                f"wal_warning ({self.wal_warning:g}) must be above 0, and at most wal_failure"
                f" ({self.wal_failure:g})",
                "give shares of the limit, as 0.5 and 0.8",
            )


@dataclass(frozen=True)
class HealthProblem:
    """A problem of a pipeline.

    `object`: the slot, table, publisher or pipeline that has it. `reason`: a sentence that names the object.
    """

    severity: Severity
    kind: ProblemKind
    object: str
    reason: str
    hint: str = ""

    def to_text(self) -> str:
        text = f"{self.severity}: {self.reason}"
        return f"{text}\n  hint: {self.hint}" if self.hint else text


@dataclass(frozen=True)
class HealthReport:
    """The problems of a pipeline, failures first."""

    pipeline: str
    problems: tuple[HealthProblem, ...] = ()

    @property
    def has_failed(self) -> bool:
        return any(problem.severity is Severity.FAILURE for problem in self.problems)

    def to_text(self) -> str:
        if not self.problems:
            return f"pipeline {self.pipeline}: no problems"
        return "\n".join(problem.to_text() for problem in self.problems)

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON types, for XCom."""
        problems = [
            {name: str(value) for name, value in asdict(problem).items()} for problem in self.problems
        ]
        return {"pipeline": self.pipeline, "healthy": not self.problems, "problems": problems}

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Self:
        problems = (
            HealthProblem(
                Severity(one["severity"]),
                ProblemKind(one["kind"]),
                one["object"],
                one["reason"],
                one["hint"],
            )
            for one in found["problems"]
        )
        return cls(found["pipeline"], tuple(problems))


def find_health_problems(status: PipelineStatus, limits: HealthLimits) -> HealthReport:
    """Return the problems of a status, at the time at which it was read."""
    found = _problems(status, limits, status.read_at)
    failures_first = sorted(found, key=lambda one: one.severity is Severity.WARNING)
    return HealthReport(status.pipeline, tuple(failures_first))


def _problems(status: PipelineStatus, limits: HealthLimits, now: datetime) -> Iterator[HealthProblem]:
    name = status.pipeline
    kind = ProblemKind.REPORTED if status.is_ours else ProblemKind.NOT_OURS
    for sentence in status.problems:
        if sentence in status.warnings:
            yield HealthProblem(Severity.WARNING, ProblemKind.REPORTED, name, sentence)
        else:
            yield HealthProblem(Severity.FAILURE, kind, name, sentence)
    if not status.set_up:
        reason = f"pipeline {name} has not been set up: it has no lake and no record"
        yield HealthProblem(Severity.FAILURE, ProblemKind.NOT_SET_UP, name, reason, errors.SNAPSHOT)
        return
    yield from _of_slot(status, limits, now)
    if limits.is_continuous:
        yield from _of_heartbeat(status, limits, now)
    yield from _of_lag(status, limits, now)
    for table in status.tables:
        yield from _of_table(table, limits, now)
    for publisher in status.publishers:
        yield from _of_publisher(publisher)


def _of_slot(status: PipelineStatus, limits: HealthLimits, now: datetime) -> Iterator[HealthProblem]:
    slot = status.slot
    if slot is None:
        reason = f"pipeline {status.pipeline} has no slot at {status.source.address}"
        hint = errors.prove_source()
        yield HealthProblem(Severity.FAILURE, ProblemKind.SLOT_MISSING, status.pipeline, reason, hint)
        return
    if slot.invalidation:
        why = slot.why_invalidated
        yield HealthProblem(Severity.FAILURE, ProblemKind.SLOT_LOST, slot.name, why, errors.NEW_EPOCH)
        return
    if limits.is_continuous and not slot.active and not _starts(status.app, limits, now):
        reason = f"slot {slot.name} is not read by any process"
        yield HealthProblem(Severity.FAILURE, ProblemKind.SLOT_INACTIVE, slot.name, reason, _START)
    yield from _of_wal(slot, status.wal_limit_bytes, limits)


def _of_wal(slot: SlotStatus, limit: int | None, limits: HealthLimits) -> Iterator[HealthProblem]:
    held = slot.held_bytes or 0
    if limit:
        share = held / limit
        if share >= limits.wal_warning:
            severity = Severity.FAILURE if share >= limits.wal_failure else Severity.WARNING
            reason = (
                f"slot {slot.name} retains {show_bytes(held)} of WAL, {share:.0%} of the limit of"
                f" {show_bytes(limit)}"
            )
            yield HealthProblem(severity, ProblemKind.WAL_RETAINED, slot.name, reason, _FREE_WAL)
            return
    if slot.wal_status == "unreserved":
        reason = f"slot {slot.name} is past max_slot_wal_keep_size: the next checkpoint may invalidate it"
        yield HealthProblem(Severity.FAILURE, ProblemKind.WAL_RETAINED, slot.name, reason, _FREE_WAL)


def _starts(app: AppStatus | None, limits: HealthLimits, now: datetime) -> bool:
    """Return True if an app runs and has reported: it starts, or connects again."""
    return app is not None and app.is_running and _is_recent(app, limits, now)


def _is_recent(app: AppStatus, limits: HealthLimits, now: datetime) -> bool:
    return app.reported_at is not None and (now - app.reported_at).total_seconds() < limits.heartbeat_s


def _of_heartbeat(status: PipelineStatus, limits: HealthLimits, now: datetime) -> Iterator[HealthProblem]:
    app, name = status.app, status.pipeline
    if app is not None and _is_recent(app, limits, now):
        return
    if app is None or app.reported_at is None:
        reason, hint = f"the replication app of pipeline {name} has never reported", _START
    else:
        end, hint = _end(app, app.reported_at, now)
        reason = f"the replication app of pipeline {name}, on {app.holder}, {end}"
    yield HealthProblem(Severity.FAILURE, ProblemKind.NO_HEARTBEAT, name, reason, hint)


def _end(app: AppStatus, reported_at: datetime, now: datetime) -> tuple[str, str]:
    """Return how the app ended, as far as it is recorded, and a hint."""
    if app.ended is None:
        return f"last reported {show_duration((now - reported_at).total_seconds())} ago", _START
    end = f"{app.ended.kind} {show_duration((now - app.ended.time).total_seconds())} ago"
    if not app.ended.error:
        return end, _START
    return f"{end}: {app.ended.error}: {app.ended.reason}", app.ended.hint or _START


def _of_lag(status: PipelineStatus, limits: HealthLimits, now: datetime) -> Iterator[HealthProblem]:
    oldest = None if status.changelog is None else status.changelog.oldest_needed_at
    if oldest is None:
        return
    seconds = (now - oldest).total_seconds()
    if seconds >= limits.lag_s:
        reason = (
            f"pipeline {status.pipeline} lags {show_duration(seconds)} behind the source, above the limit of"
            f" {show_duration(limits.lag_s)}"
        )
        yield HealthProblem(Severity.FAILURE, ProblemKind.LAG, status.pipeline, reason, _LAGS)


def _of_table(table: TableStatus, limits: HealthLimits, now: datetime) -> Iterator[HealthProblem]:
    if table.state is TableState.ERRORED:
        reason = errors.errored(table.table, table.error or "error", table.reason)
        yield HealthProblem(Severity.FAILURE, ProblemKind.TABLE_ERRORED, table.table, reason, table.hint)
        return
    age = (now - table.since).total_seconds()
    waits = table.merges.waiting_s if table.merges is not None else 0.0
    is_on_its_way = table.state.is_being_copied or table.state is TableState.CATCHING_UP
    if is_on_its_way and age >= limits.stalled_s:
        reason = f"table {table.table} has been {table.state} for {show_duration(age)}"
    elif table.state.is_followed and waits >= limits.stalled_s:
        reason = f"table {table.table} has changes that have waited for a merge for {show_duration(waits)}"
    else:
        return
    yield HealthProblem(Severity.FAILURE, ProblemKind.TABLE_STALLED, table.table, reason, _LAGS)


def _of_publisher(publisher: PublisherStatus) -> Iterator[HealthProblem]:
    name = publisher.name
    if publisher.reason:
        reason = f"publisher {name} stopped: {publisher.error}: {publisher.reason}"
        yield HealthProblem(Severity.FAILURE, ProblemKind.PUBLISHER_STOPPED, name, reason, publisher.hint)
    for table in publisher.stopped:
        reason = f"publisher {name} stopped table {table.table}: {table.error}: {table.reason}"
        yield HealthProblem(
            Severity.FAILURE, ProblemKind.PUBLISHER_STOPPED, f"{name}/{table.table}", reason, table.hint
        )
