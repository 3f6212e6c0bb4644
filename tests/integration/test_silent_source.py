"""A source that falls silent while every connection is kept: each wait for it ends within a limit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import SourceConnectionError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver import receiver as receiver_module
from airflow_provider_pgrepl.replication.receiver.receiver import ReconnectingReceiver
from airflow_provider_pgrepl.replication.source import connection as connection_module
from airflow_provider_pgrepl.replication.source import connection as time_limit
from airflow_provider_pgrepl.replication.source import slot_creation
from airflow_provider_pgrepl.replication.source.connection import connect, row
from airflow_provider_pgrepl.replication.source.copy import copy_stream
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange
from airflow_provider_pgrepl.replication.source.server_errors import source_errors
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from airflow_provider_pgrepl.replication.source.stream import Liveness, ReplicationStream, is_at_work
from tests.support.received import Received
from tests.support.replicated import execute, let_senders_wait, wait_until
from tests.support.silent_proxy import SilentProxy, silent_proxy

SOON_S = 30


@pytest.fixture
def tunnel(dsn: str) -> Iterator[tuple[SilentProxy, str]]:
    with silent_proxy(dsn) as through:
        yield through


def ends_soon(work: Callable[[], object]) -> object:
    """Return the result of the work, or its exception; fail if it does not end within SOON_S seconds."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive(), "it waits for a server that says nothing"
    return found[0]


def test_a_statement_is_not_waited_for_longer_than_its_limit(tunnel):
    proxy, through = tunnel
    with closing(connect(through, "test")) as connection:
        assert row(connection, "select 1") == (1,)
        connection.answer_limit_s = 0.5
        proxy.fall_silent()

        def ask() -> None:
            with source_errors("asking"):
                row(connection, "select 1")

        error = ends_soon(ask)
    assert isinstance(error, SourceConnectionError)
    assert "no answer within 0.5 s" in error.message


def test_a_limit_ends_only_the_statement_that_it_was_for(dsn):
    with closing(connect(dsn, "test")) as connection:
        connection.answer_limit_s = 2
        for _ in range(3):
            assert row(connection, "select 1") == (1,)
        with time_limit.patience(connection, None):
            row(connection, "select pg_sleep(3)")
        assert row(connection, "select 1") == (1,)
        with pytest.raises(psycopg2.OperationalError, match="no answer within"):
            row(connection, "select pg_sleep(20)")


class DroppedConnection(time_limit.LimitedConnection):
    """Its socket libpq has closed in another thread's statement, which the driver has not yet looked at."""

    def fileno(self) -> int:
        return -1


def test_a_statement_on_a_connection_that_another_thread_lost_tells_of_the_loss(dsn):
    with (
        closing(psycopg2.connect(dsn, connection_factory=DroppedConnection)) as connection,
        pytest.raises(SourceConnectionError, match="check the network and the server"),
        source_errors("asking"),
    ):
        row(connection, "select 1")


def test_the_server_is_asked_to_notice_that_we_are_gone(dsn):
    with closing(connect(dsn, "test")) as connection:
        assert row(connection, "show tcp_keepalives_idle") == ("30",)
        line = socket.socket(fileno=socket.dup(connection.fileno()))
        with line:
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 30
            assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


def test_a_sender_that_waits_is_not_at_work_and_one_that_decodes_is(dsn, tmp_path: Path):
    received = begun(dsn, tmp_path)
    slot, publication = received.pipeline.slot, received.pipeline.publication
    with ReplicationStream(dsn, slot, publication) as stream:
        stream.read(1.0, 1 << 20)
        wait_until(lambda: not is_at_work(dsn, stream.sender_pid))
        # No row of these is published: the walsender decodes them, and sends nothing.
        execute(dsn, "create table other (a int)", "insert into other select generate_series(1, 1500000)")
        wait_until(lambda: is_at_work(dsn, stream.sender_pid))
    assert not is_at_work(dsn, 0)


def begun(dsn: str, folder: Path) -> Received:
    execute(dsn, "create table t(id int primary key, v text)")
    pipeline = Received(dsn, folder, ("public.t",), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def test_the_receiver_connects_again_when_the_stream_falls_silent(tunnel, dsn, tmp_path: Path, monkeypatch):
    proxy, through = tunnel
    # wal_sender_timeout would end the stream at the server's side, and nothing at ours.
    let_senders_wait(dsn)
    monkeypatch.setattr(receiver_module, "Liveness", partial(Liveness, limit_s=2.0))
    monkeypatch.setattr(time_limit, "ANSWER_LIMIT_S", 3.0)
    monkeypatch.setattr(connection_module, "CONNECT_TIMEOUT_S", 5)
    received = begun(dsn, tmp_path)
    reception = ReconnectingReceiver(through, received.pipeline)
    reception.start()
    try:
        proxy.fall_silent()
        execute(dsn, "insert into t values (1, 'a')")
        wait_until(lambda: reception._receiver.failed.is_set(), SOON_S, "the loss to be noticed")
        proxy.speak_again()
        # The server has not noticed: the slot is free when its sender is gone.
        execute(dsn, "select pg_terminate_backend(active_pid) from pg_replication_slots where active")

        def is_there() -> bool:
            assert reception.error is None, reception.error
            return len(received.changelog_rows("I")) == 1

        wait_until(is_there, 60, "the change to arrive")
    finally:
        reception.stop()


def test_a_copy_that_brings_nothing_ends(tunnel, dsn, monkeypatch):
    proxy, through = tunnel
    monkeypatch.setattr(copy_stream, "STALL_LIMIT_S", 1.0)
    monkeypatch.setattr(copy_stream, "_END_GRACE_S", 1.0)
    execute(dsn, "create table t as select i, repeat('x', 1000) v from generate_series(1, 100000) i")
    with closing(psycopg2.connect(dsn)) as keeper, keeper.cursor() as cursor:
        cursor.execute("begin isolation level repeatable read; select pg_export_snapshot()")
        found = cursor.fetchone()
        part = CopyRange(0, TableName("public", "t"), "COPY public.t TO STDOUT (FORMAT csv)", 1)

        def copy() -> None:
            with copy_stream.open_copy(through, found[0], part) as stream:
                assert stream.read(1000)
                proxy.fall_silent()
                while stream.read(1 << 20):
                    pass

        error = ends_soon(copy)
    assert isinstance(error, SourceConnectionError)
    assert "has sent nothing for 1 s" in error.message


def test_a_slot_whose_creation_is_not_answered_is_given_up(tunnel, dsn, monkeypatch):
    proxy, through = tunnel
    monkeypatch.setattr(time_limit, "ANSWER_LIMIT_S", 3.0)
    monkeypatch.setattr(slot_creation, "_CANCEL_GRACE_S", 1.0)
    blocker = psycopg2.connect(dsn)
    blocker.cursor().execute("select pg_current_xact_id()")
    threading.Timer(1.0, proxy.fall_silent).start()
    error = ends_soon(lambda: export_snapshot(through, "silent", timeout_s=3))
    blocker.close()
    assert isinstance(error, SourceConnectionError)
