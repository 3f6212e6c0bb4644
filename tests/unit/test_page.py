"""The page's decisions: problems of a pipeline, its documents, and databases that do not answer."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.app.page import documents
from airflow_provider_pgrepl.replication.app.page.documents import (
    Databases,
    find_problems,
    pipeline_document,
    state_of,
    table_lags,
    task_of_actor,
)
from airflow_provider_pgrepl.replication.app.status.health import HealthLimits
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.state.overview import (
    ErroredTable,
    LastSample,
    PipelineRow,
)
from airflow_provider_pgrepl.replication.state.recorded_events import RunEvent
from airflow_provider_pgrepl.replication.state.samples import TableSample, table_sample_interval_s

NOW = datetime(2026, 1, 31, 12, 7, tzinfo=UTC)
HEALTHY = PipelineRow(
    "shop",
    "6b0e",
    "pgrepl_shop",
    "/lake/shop",
    NOW,
    reported_at=NOW - timedelta(seconds=2),
    run=RunEvent("started", NOW - timedelta(days=1), "pgrepl replicate on host:1 as app"),
    sample=LastSample(NOW - timedelta(seconds=30), 1.5, 4096, 100.0, 400, 1000, True),
    states={"streaming": 3},
)


def reasons(row: PipelineRow) -> list[tuple[str, str]]:
    return [(problem.severity, problem.reason) for problem in find_problems(row)]


def sampled(**values: object) -> PipelineRow:
    return replace(HEALTHY, sample=replace(HEALTHY.sample, **values))


def silent(kind: str) -> PipelineRow:
    run = RunEvent(kind, NOW, "pgrepl replicate on host:1 as app", "SlotError", "it is gone", "begin anew")
    return replace(HEALTHY, reported_at=NOW - timedelta(minutes=5), run=run)


def test_limits_are_those_of_the_health_check() -> None:
    limits = HealthLimits()
    assert (limits.lag_s, limits.wal_warning, limits.wal_failure, limits.heartbeat_s) == (
        documents.LAG_S,
        documents.WAL_WARNING,
        documents.WAL_FAILURE,
        documents.HEARTBEAT_S,
    )


def test_healthy_pipeline_has_no_problems() -> None:
    assert (state_of(HEALTHY), reasons(HEALTHY)) == ("running", [])


@pytest.mark.parametrize(
    ("row", "severity", "reason"),
    [
        (replace(HEALTHY, states={"errored": 1}), "failure", "1 table is errored"),
        (replace(HEALTHY, states={"errored": 2}), "failure", "2 tables are errored"),
        (sampled(lag_seconds=301.0), "failure", "the lake lags 301 s behind the source"),
        (sampled(slot_active=False), "failure", "slot pgrepl_shop is not read by any process"),
        (
            sampled(wal_retained_bytes=600),
            "warning",
            "slot pgrepl_shop retains 60% of its WAL limit (max_slot_wal_keep_size)",
        ),
        (
            sampled(wal_retained_bytes=800),
            "failure",
            "slot pgrepl_shop retains 80% of its WAL limit (max_slot_wal_keep_size)",
        ),
        (silent("failed"), "failure", "the replication app failed: SlotError: it is gone"),
        (silent("stopped"), "warning", "the replication app was stopped"),
        (silent("started"), "failure", "the replication app no longer reports"),
        (
            replace(HEALTHY, reported_at=None, run=None, sample=None),
            "warning",
            "the replication app has never reported",
        ),
    ],
)
def test_problem_is_found(row: PipelineRow, severity: str, reason: str) -> None:
    assert reasons(row) == [(severity, reason)]


def test_app_that_was_stopped_does_not_run_although_it_reported_lately() -> None:
    row = replace(silent("stopped"), reported_at=NOW - timedelta(seconds=1))
    assert (state_of(row), reasons(row)) == ("stopped", [("warning", "the replication app was stopped")])
    # An app that another one has replaced may end later than that one begins.
    assert state_of(replace(row, reported_at=NOW + timedelta(seconds=1))) == "running"


def test_old_sample_does_not_show_the_present() -> None:
    assert reasons(sampled(time=NOW - timedelta(minutes=10), slot_active=False)) == []


def test_failures_come_before_warnings() -> None:
    row = replace(silent("stopped"), states={"errored": 1})
    assert [severity for severity, _ in reasons(row)] == ["failure", "warning"]


def test_gap_in_samples_is_a_gap_in_the_line() -> None:
    quarter = timedelta(minutes=15)
    begin = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)
    row = replace(HEALTHY, lags=[(begin - 2 * quarter, 3.0), (begin, 1.0)])
    lags = pipeline_document(row)["lags"]
    assert len(lags) == 96
    assert lags[-4:] == [None, 3.0, None, 1.0]


def test_line_of_a_table_has_the_grid_of_its_pipeline_with_gaps_for_outages() -> None:
    # Samples every 10 minutes of 4 hours, with an outage from 9:00 to 10:30.
    begin = NOW - timedelta(hours=4)
    times = [begin + timedelta(minutes=10 * number) for number in range(25)]
    outage = (NOW.replace(hour=9, minute=0), NOW.replace(hour=10, minute=30))
    samples = [sample_of(time, time.minute) for time in times if not outage[0] <= time < outage[1]]
    lags = table_lags(samples, NOW, tables=5)
    assert len(lags) == 96
    assert [lag is not None for lag in lags] == [False] * 79 + [True] * 4 + [False] * 6 + [True] * 7
    assert lags[-3:] == [37, 57, 7]
    assert table_lags([], NOW, tables=5) == []


def test_step_of_a_line_is_longer_than_the_interval_of_samples_of_many_tables() -> None:
    interval = timedelta(seconds=table_sample_interval_s(1000))
    assert interval > timedelta(minutes=45)
    times = [NOW - number * interval for number in range(int(timedelta(days=1) / interval))]
    lags = table_lags([sample_of(time, 1.0) for time in reversed(times)], NOW, tables=1000)
    assert len(lags) == 16
    assert None not in lags[1:]


def sample_of(time: datetime, lag_s: float) -> TableSample:
    return TableSample(time, TableName("public", "t"), "streaming", None, lag_s, None, None, None)


def test_last_error_is_the_newer_one_of_table_and_application() -> None:
    table = ErroredTable(TableName("public", "t"), NOW - timedelta(hours=1), "DriftError", "r", "h")
    assert pipeline_document(replace(HEALTHY, errored=table))["last_error"]["table"] == "public.t"
    both = replace(silent("failed"), errored=table)
    assert pipeline_document(both)["last_error"]["error"] == "SlotError"
    assert pipeline_document(HEALTHY)["last_error"] is None


def test_actor_names_task_of_airflow() -> None:
    task = "started by task replicate of shop, run scheduled__2026-01-31T12:00:00+00:00, try 2"
    assert task_of_actor(f"pgrepl replicate on host:71 as app, {task}") == {
        "task": "replicate",
        "dag": "shop",
        "run": "scheduled__2026-01-31T12:00:00+00:00",
        "try": "2",
    }
    assert task_of_actor("pgrepl pause on host:71 as app") is None


def test_silent_database_delays_no_other_and_is_not_asked_again_while_it_is_silent() -> None:
    databases: Databases[str] = Databases()
    end, asked = threading.Event(), []

    def wait_long() -> str:
        asked.append(1)
        end.wait(60)
        return "late"

    with pytest.raises(SourceConnectionError, match="connection eu has not answered"):
        databases.ask("eu", "pipelines", wait_long, 0.05)
    with pytest.raises(SourceConnectionError):
        databases.ask("eu", "tables", wait_long, 60)
    assert databases.ask("us", "pipelines", lambda: "here") == "here"
    assert asked == [1]
    end.set()
    for _ in range(1000):
        try:
            assert databases.ask("eu", "pipelines", lambda: "back", 60) == "back"
        except SourceConnectionError:
            threading.Event().wait(0.01)
        else:
            return
    pytest.fail("the database is still taken for silent")


def test_equal_questions_share_an_answer() -> None:
    databases: Databases[int] = Databases()
    end, asked = threading.Event(), []

    def answer() -> int:
        asked.append(1)
        end.wait(60)
        return 7

    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(databases.ask("us", "q", answer, 60))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    while not asked:
        threading.Event().wait(0.01)
    threading.Timer(0.1, end.set).start()
    for thread in threads:
        thread.join(60)
    assert found == [7, 7, 7]


def test_error_of_an_answer_reaches_the_caller() -> None:
    def fail() -> str:
        raise SourceConnectionError("refused")

    with pytest.raises(SourceConnectionError, match="refused"):
        Databases[str]().ask("us", "q", fail)
