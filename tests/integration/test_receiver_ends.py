"""Ends of a receiver: half-way through its start, inside a transaction, when its connection is lost."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable

from airflow_provider_pgrepl.errors import ChangelogError, PgReplError, SlotError, SourceConnectionError
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from tests.conftest import closing_connection
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    execute(dsn, "create table t(id int primary key, v text)")
    pipeline = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def backends(dsn: str) -> int:
    """Connections of this product to the database."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute(
            "select count(*) from pg_stat_activity"
            " where datname = current_database() and application_name like 'pgrepl %%'"
            " and (application_name like '%% receive %%' or application_name like '%% catalog %%')"
        )
        return int(cursor.fetchone()[0])


def test_a_receiver_that_never_started_can_be_stopped(received: Received, dsn: str) -> None:
    before = received.slot().confirmed_flush_lsn, received.durable_lsn
    receiver = Receiver(dsn, received.pipeline)
    receiver.stop()
    assert receiver.error is None
    wait_until(lambda: backends(dsn) == 0, what="all connections to be closed")
    assert (received.slot().confirmed_flush_lsn, received.durable_lsn) == before


def test_a_receiver_can_be_stopped_twice(received: Received, dsn: str) -> None:
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    receiver.stop()
    receiver.stop()
    assert receiver.error is None
    wait_until(lambda: backends(dsn) == 0, what="all connections to be closed")


def test_a_start_that_fails_leaves_no_connection_and_no_busy_slot(received: Received, dsn: str) -> None:
    folder = Path(received.changelog)
    folder.rename(folder.with_name("away"))
    receiver = Receiver(dsn, received.pipeline)
    with pytest.raises(ChangelogError):
        receiver.start()
    receiver.stop()
    wait_until(lambda: backends(dsn) == 0, what="all connections to be closed")
    folder.with_name("away").rename(folder)
    execute(dsn, "insert into t values (1, 'a')")
    execute(dsn, f"select pg_replication_slot_advance('{received.pipeline.slot}', pg_current_wal_lsn())")
    with pytest.raises(SlotError):
        Receiver(dsn, received.pipeline).start()
    wait_until(lambda: backends(dsn) == 0, what="all connections to be closed")


@pytest.mark.thorough(
    "test_changelog_feed: a keepalive inside a transaction; test_receiver: nothing is told early"
)
def test_a_transaction_received_by_half_is_not_told_when_it_stops(received: Received, dsn: str) -> None:
    before = received.durable_lsn
    execute(dsn, "insert into t select g, repeat('x', 200) from generate_series(1, 200000) g")
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    wait_until(lambda: receiver._feed._splitter.is_open, what="the transaction to have begun")
    receiver.stop()
    assert receiver.error is None
    assert received.changelog_files() == []
    assert received.durable_lsn < before + 40_000_000, "the transaction's commit lies beyond"
    assert received.slot().confirmed_flush_lsn <= received.durable_lsn
    received.receive()
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*) from t")
        assert cursor.fetchone()[0] == len(received.changelog_rows("I"))


def test_a_lost_connection_ends_it_soon_although_the_writer_is_behind(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer writes all that was read before, and waits for nothing more."""
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    go_on, is_behind = threading.Event(), threading.Event()
    take = receiver._feed.take

    def slow(chunk: Any) -> None:
        # A keepalive can come before the row.
        if chunk.messages:
            is_behind.set()
            go_on.wait(300)
        take(chunk)

    monkeypatch.setattr(receiver._feed, "take", slow)
    execute(dsn, "insert into t values (1, 'a')")
    assert is_behind.wait(300)
    execute(dsn, f"select pg_terminate_backend({received.slot().active_pid})")
    assert receiver.failed.wait(60)
    go_on.set()
    began = time.monotonic()
    receiver.stop()
    assert time.monotonic() - began < 20
    assert isinstance(receiver.error, SourceConnectionError)
    assert not any(thread.is_alive() for thread in receiver._threads)
    assert len(received.changelog_rows("I")) == 1
    received.receive()
    assert len(received.changelog_rows("I")) == 1


def test_failed_changelog_writer_ends_receiver_and_closes_connections(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver(dsn, received.pipeline)
    receiver.start()
    ChangelogWriter(received.changelog)
    execute(dsn, "insert into t values (1, 'a')")
    assert receiver.failed.wait(60)
    assert isinstance(receiver.error, PgReplError)
    version = DeltaTable(received.changelog).version()
    receiver.stop()
    assert DeltaTable(received.changelog).version() == version
    wait_until(lambda: backends(dsn) == 0, what="all connections to be closed")


def test_visible_changelog_rows_are_below_durable_lsn(received: Received, dsn: str) -> None:
    with received.receiving() as receiver:
        for n in range(5):
            execute(dsn, f"insert into t values ({n}, 'a')")
            wait_until_seen(receiver, received.source_lsn())
            rows = received.changelog_rows("I")
            assert len(rows) == n + 1
            assert LSN(rows[-1]["commit_lsn"]) < received.durable_lsn
