"""The decision from a status to problems."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app.status.health import (
    HealthLimits,
    HealthReport,
    ProblemKind,
    Severity,
    find_health_problems,
)
from airflow_provider_pgrepl.replication.app.status.status import (
    AppStatus,
    ChangelogStatus,
    PipelineStatus,
    PublisherStatus,
    SlotStatus,
    SourceStatus,
    TableStatus,
)
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import StoppedTable
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.state.progress import TableMerges
from airflow_provider_pgrepl.replication.state.recorded_events import RunEvent
from airflow_provider_pgrepl.replication.state.tables import TableState

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
MIB = 1 << 20
SLOT = SlotStatus("pgrepl_shop", True, 42, 1 * MIB, "reserved", None)
APP = AppStatus("host:1", NOW - timedelta(seconds=2), 10.0, is_running=True)
STATUS = PipelineStatus(
    "shop",
    "/lake",
    SourceStatus("app@db:5432/shop", 180000, LSN(1000), 100 * MIB),
    True,
    slot=SLOT,
    app=APP,
    read_at=NOW,
)

STOPPED = StoppedTable("public.orders", (), EventPosition(Epoch(1), LSN(1), 0), "DriftError", "dropped", "")


def table(state: TableState, age_s: float = 0.0, **changed: Any) -> TableStatus:
    since = NOW - timedelta(seconds=age_s)
    found = TableStatus("public.orders", state, since, LSN(1), 0, 1, "", "", "", None)
    return replace(found, **changed)


def kinds(status: PipelineStatus, **limits: Any) -> list[tuple[str, str]]:
    report = find_health_problems(status, HealthLimits(**limits))
    return [(str(problem.severity), str(problem.kind)) for problem in report.problems]


def test_running_pipeline_without_lag_has_no_problems() -> None:
    status = replace(STATUS, tables=(table(TableState.STREAMING, 1e9), table(TableState.PAUSED, 1e9)))
    assert kinds(status) == []


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"set_up": False}, ("failure", "not_set_up")),
        ({"slot": None}, ("failure", "slot_missing")),
        (
            {"slot": replace(SLOT, invalidation="wal_removed", why_invalidated="invalidated")},
            ("failure", "slot_lost"),
        ),
        ({"slot": replace(SLOT, held_bytes=50 * MIB)}, ("warning", "wal_retained")),
        ({"slot": replace(SLOT, held_bytes=80 * MIB)}, ("failure", "wal_retained")),
        ({"slot": replace(SLOT, wal_status="unreserved")}, ("failure", "wal_retained")),
        ({"app": None}, ("failure", "no_heartbeat")),
        ({"app": replace(APP, reported_at=NOW - timedelta(seconds=61))}, ("failure", "no_heartbeat")),
        (
            {"changelog": ChangelogStatus(1, 1, oldest_needed_at=NOW - timedelta(seconds=300))},
            ("failure", "lag"),
        ),
        (
            {"tables": (table(TableState.ERRORED, error="DriftError", reason="gone", hint="undo it"),)},
            ("failure", "table_errored"),
        ),
        ({"tables": (table(TableState.CATCHING_UP, 3600),)}, ("failure", "table_stalled")),
        (
            {"tables": (table(TableState.STREAMING, merges=TableMerges(1, 1, 1, waiting_s=3600)),)},
            ("failure", "table_stalled"),
        ),
        ({"publishers": (PublisherStatus("kafka", "kafka", reason="no"),)}, ("failure", "publisher_stopped")),
        (
            {"publishers": (PublisherStatus("kafka", "kafka", stopped=(STOPPED,)),)},
            ("failure", "publisher_stopped"),
        ),
        ({"problems": ("the changelog cannot be read",)}, ("failure", "reported")),
        ({"problems": ("left out",), "warnings": ("left out",)}, ("warning", "reported")),
        ({"problems": ("another source",), "is_ours": False}, ("failure", "not_ours")),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_each_problem_has_its_severity_and_kind(changed: Any, expected: tuple[str, str]) -> None:
    assert kinds(replace(STATUS, **changed)) == [expected]


def test_slot_that_no_process_reads_is_failure_unless_app_starts_or_runs_by_schedule() -> None:
    unread = replace(STATUS, slot=replace(SLOT, active=False, active_pid=None))
    assert kinds(unread) == []  # the app holds its lock, and has just reported: it starts
    ended = replace(unread, app=replace(APP, is_running=False))
    assert kinds(ended) == [("failure", "slot_inactive")]
    silent = replace(unread, app=replace(APP, reported_at=NOW - timedelta(hours=1)))
    assert kinds(silent) == [("failure", "slot_inactive"), ("failure", "no_heartbeat")]
    assert kinds(silent, is_continuous=False) == []


def test_missing_heartbeat_is_explained_by_the_recorded_end() -> None:
    silent = replace(APP, reported_at=NOW - timedelta(hours=1), is_running=False)
    ended = NOW - timedelta(minutes=10)
    stopped = RunEvent("stopped", ended, "host:1")
    failed = RunEvent("failed", ended, "host:1", "SourceAuthenticationError", "wrong password", "mend it")

    def last(app: AppStatus) -> tuple[str, str]:
        report = find_health_problems(replace(STATUS, app=app), HealthLimits())
        return report.problems[-1].reason, report.problems[-1].hint

    app = "the replication app of pipeline shop, on host:1,"
    start = last(silent)[1]
    assert last(silent)[0] == f"{app} last reported 60 min ago"
    assert last(replace(silent, ended=stopped)) == (f"{app} stopped 10 min ago", start)
    assert last(replace(silent, ended=failed)) == (
        f"{app} failed 10 min ago: SourceAuthenticationError: wrong password",
        "mend it",
    )


def test_retained_wal_without_limit_is_no_problem() -> None:
    source = replace(STATUS.source, wal_keep_bytes=None)
    assert kinds(replace(STATUS, source=source, slot=replace(SLOT, held_bytes=1 << 50))) == []


def test_failures_precede_warnings_and_each_names_its_object_and_hint() -> None:
    status = replace(
        STATUS,
        problems=("the pattern leaves out t",),
        warnings=("the pattern leaves out t",),
        tables=(table(TableState.ERRORED, error="DriftError", reason="dropped", hint="undo it"),),
    )
    report = find_health_problems(status, HealthLimits())
    first, second = report.problems
    assert (first.severity, first.kind) == (Severity.FAILURE, ProblemKind.TABLE_ERRORED)
    assert (first.object, first.hint) == ("public.orders", "undo it")
    assert first.reason == "table public.orders is errored: DriftError: dropped"
    assert second.severity is Severity.WARNING
    assert report.has_failed
    assert HealthReport.from_dict(report.to_dict()) == report


@pytest.mark.parametrize("limits", [{"lag_s": 0}, {"wal_warning": 0.9}, {"wal_warning": 0}])
def test_limits_that_cannot_be_meant_are_rejected(limits: Any) -> None:
    with pytest.raises(ConfigError):
        HealthLimits(**limits)
