"""The line a minute of a replication, from a real source and state."""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import StateError
from airflow_provider_pgrepl.replication.app.status import summary
from airflow_provider_pgrepl.replication.app.status.summary import SummaryLog
from airflow_provider_pgrepl.replication.lake.apply.work_item import ApplierProgress
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.changelog_feed import ReceiverProgress
from airflow_provider_pgrepl.replication.source.server import wal_lsn
from airflow_provider_pgrepl.replication.source.slot import drop_slot
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded
from tests.support.replicated import wait_until


class ReportedPipeline:
    """A recorded pipeline with a slot, of which two threads would say how far they are."""

    def __init__(self, dsn: str, pg: psycopg2.extensions.connection, **how: float) -> None:
        pg.cursor().execute("create table a (id int primary key); create table b (id int primary key)")
        self.slot = f"summary_{psycopg2.extensions.parse_dsn(dsn)['dbname']}"
        self.shop = Recorded(dsn, slot=self.slot)
        self.pg = pg
        with create_slot(dsn, self.slot, timeout_s=60):
            pass
        self.received, self.applied = ReceiverProgress(), ApplierProgress()
        self.log = SummaryLog(
            dsn,
            dsn,
            self.shop.pipeline,
            lambda: self.received,
            lambda: self.applied,
            lambda: self.answer(),
            **how,
        )

    def answer(self) -> None:
        """Answer a keepalive request. Does nothing, unless a test replaces it."""

    def apply_all(self, age_s: float) -> None:
        self.applied.applied_lsn = LSN(wal_lsn(self.pg) - 1)
        self.applied.commit_ts = datetime.now(UTC) - timedelta(seconds=age_s)


@pytest.fixture
def reported(dsn, pg, monkeypatch):
    # In most tests nothing answers.
    monkeypatch.setattr(summary, "_ANSWER_S", 0.2)
    made = ReportedPipeline(dsn, pg)
    yield made
    drop_slot(pg, made.slot)


def test_states_changes_lag_and_wal_held_are_read(reported):
    reported.apply_all(age_s=7.0)
    reported.shop.set_state("public.b", TableState.ERRORED, reason="a reason", hint="a hint")
    reported.pg.cursor().execute("insert into a select generate_series(1, 10000)")
    reported.received.changes, reported.applied.changes = 10_000, 3
    found = reported.log.read()
    assert found.states == {TableState.STREAMING: 1, TableState.ERRORED: 1}
    assert found.errored == ("public.b",)
    assert (found.changes, found.applied) == (10_000, 3)
    assert found.lag_s == pytest.approx(7.0, abs=5.0)
    assert found.lag_bytes > 500_000
    assert found.held_bytes >= found.lag_bytes
    assert reported.log.read().changes == 0, "counted since the last time"


def test_an_idle_source_is_not_said_to_be_hours_behind(reported):
    before = reported.log.read()
    assert (before.lag_s, before.lag_bytes) == (None, None), "nothing is applied yet"
    reported.apply_all(age_s=36_000.0)
    found = reported.log.read()
    assert found.lag_s < 60
    assert found.lag_bytes < 100_000


def test_an_idle_pipeline_is_as_late_as_its_answer_though_other_databases_write_wal(reported):
    """The server's own writes, and the records of this pipeline, move the WAL and make no point."""
    reported.apply_all(age_s=36_000.0)
    reported.applied.caught_up, reported.applied.version = True, 7
    reported.received.changelog_version = 7

    def answer() -> None:
        reported.received.seen_lsn = wal_lsn(reported.pg)

    reported.answer = answer
    reported.pg.cursor().execute("insert into a values (1)")
    found = reported.log.read()
    assert found.lag_s < 5
    reported.received.changelog_version = 8
    reported.pg.cursor().execute("insert into a values (2)")
    assert reported.log.read().lag_s > 5, "something was received that is not in the lake"


def test_lines_are_logged_and_what_cannot_be_read_is_said_and_stops_nothing(reported, pg, caplog):
    reported.log._interval_s = 0.05
    with caplog.at_level(logging.INFO, "airflow_provider_pgrepl"):
        reported.log.start()
        try:
            wait_until(lambda: "2 tables: 2 streaming; 0 changes received" in caplog.text)
            pg.cursor().execute("drop schema _pgrepl cascade")
            wait_until(lambda: "no summary: " in caplog.text)
        finally:
            reported.log.stop()
    with pytest.raises(StateError):
        reported.log.read()


def test_lake_is_complete_up_to_the_clock_of_the_source_at_a_wal_end_that_it_shows(reported):
    reported.log.read()
    assert reported.log.source.complete_at is None, "nothing is applied yet"
    reported.apply_all(age_s=36_000.0)
    before = clock(reported.pg)
    reported.pg.cursor().execute("insert into a values (1)")
    reported.log.read()
    assert reported.log.source.complete_at < before, "the insert may be missing"

    def answer() -> None:
        reported.received.seen_lsn = wal_lsn(reported.pg)

    reported.applied.caught_up, reported.applied.version = True, 7
    reported.received.changelog_version = 7
    reported.answer = answer
    before = clock(reported.pg)
    reported.log.read()
    complete_at = reported.log.source.complete_at
    assert before <= complete_at <= clock(reported.pg)
    reported.answer = lambda: None
    reported.pg.cursor().execute("insert into a values (2)")
    reported.log.read()
    assert reported.log.source.complete_at == complete_at, "the second insert may be missing"


def clock(pg: psycopg2.extensions.connection) -> datetime:
    with pg.cursor() as cursor:
        cursor.execute("select clock_timestamp()")
        [found] = cursor.fetchone()
    return found
