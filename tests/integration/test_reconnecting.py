"""A receiver whose connection was lost is replaced; one that fails for another reason is not."""

from __future__ import annotations

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import BusyError, FencedError, PublicationError, SourceConnectionError
from airflow_provider_pgrepl.replication.app.progress_writer import LockKeeper
from airflow_provider_pgrepl.replication.app.reconnecting_database import open_reconnecting_database
from airflow_provider_pgrepl.replication.changelog.writer import ChangelogWriter
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.receiver import changelog_feed, receiver
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver, ReconnectingReceiver
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.received import Received, wait_until_seen
from tests.support.replicated import execute, wait_until


@pytest.fixture
def received(dsn: str, tmp_path: Path) -> Received:
    return begun(dsn, tmp_path)


def begun(dsn: str, folder: Path, **options: float) -> Received:
    execute(dsn, "create table t(id int primary key, v text)")
    pipeline = Received(dsn, folder, ("public.t",), flush_interval_s=0.05, **options)
    pipeline.begin()
    return pipeline


@contextmanager
def receiving(received: Received) -> Iterator[ReconnectingReceiver]:
    reception = ReconnectingReceiver(received.dsn, received.pipeline)
    reception.start()
    try:
        yield reception
    finally:
        reception.stop()


def end_walsender(received: Received) -> None:
    execute(
        received.dsn,
        "select pg_terminate_backend(active_pid) from pg_replication_slots"
        f" where slot_name = '{received.pipeline.slot}' and active_pid is not null",
    )


def ids(received: Received) -> list[int]:
    return [int(row["new"][0]) for row in received.changelog_rows("I")]


def test_a_walsender_that_is_ended_again_and_again_under_load_costs_nothing(
    received: Received, dsn: str
) -> None:
    is_over = threading.Event()

    def write() -> None:
        with closing_connection(dsn) as connection, connection.cursor() as cursor:
            for n in range(400):
                cursor.execute(f"insert into t select {n} * 10 + g, 'x' from generate_series(0, 9) g")
                if is_over.wait(0.002):
                    return

    with receiving(received) as reception:
        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(4):
                before = reception.progress.durable_lsn
                wait_until(lambda b=before: reception.progress.durable_lsn > b or not writer.is_alive())
                end_walsender(received)
            writer.join()
        finally:
            is_over.set()
        wait_until_seen(reception, received.source_lsn())
        told = reception.progress.confirmed_lsn
        assert reception.error is None
    assert ids(received) == list(range(4000)), "each once, in order"
    assert told
    assert reception.progress.changes >= 4000


def test_a_server_that_is_restarted_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-pg-") as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder) / "data", settings={"fsync": "off"})
        server.create()
        server.start()
        try:
            execute(server.dsn(), "create database t_restarted")
            received = begun(server.dsn("t_restarted"), tmp_path)
            permanent = open_reconnecting_database(received.dsn, "test", 30.0, threading.Event().wait)
            with receiving(received) as reception, closing(permanent) as state_db:
                state_db.migrate()
                state_db.lock(received.pipeline.name, "replicate")
                execute(received.dsn, "insert into t values (1, 'a')")
                wait_until_seen(reception, received.source_lsn())
                for immediate in (False, True):
                    server.stop(immediate=immediate)
                    wait_until(lambda: "connecting again" in caplog.text)
                    server.start()
                    assert state_db.now()
                execute(received.dsn, "insert into t values (2, 'b')")
                wait_until_seen(reception, received.source_lsn())
                with (
                    StateDatabase(received.dsn, "another") as other,
                    pytest.raises(BusyError, match=r"another process is at it already \(replicate"),
                ):
                    other.lock(received.pipeline.name, "replicate")
            assert ids(received) == [1, 2]
        finally:
            server.stop(immediate=True)
    assert len(caplog.records) < 40


def end_connections(dsn: str) -> None:
    execute(
        dsn,
        "select pg_terminate_backend(pid, 100000) from pg_stat_activity"
        " where datname = current_database() and application_name like 'pgrepl %'",
    )


def cut_once_the_slot_is_taken(received: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    """All connections of the first receiver that starts are ended when it has got as far as the changelog."""
    cuts: list[str] = []

    class Cutting(ChangelogWriter):
        def __init__(self, uri: str, *arguments: int | None) -> None:
            super().__init__(uri, *arguments)
            if not cuts:
                cuts.append(uri)
                end_connections(received.dsn)

    monkeypatch.setattr(receiver, "ChangelogWriter", Cutting)


def test_a_connection_lost_while_it_starts_is_an_outage_like_any_other(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_once_the_slot_is_taken(received, monkeypatch)
    execute(dsn, "insert into t values (1, 'a')")
    with receiving(received) as reception:
        wait_until_seen(reception, received.source_lsn())
        assert reception.error is None
    assert ids(received) == [1]


def test_a_connection_lost_right_after_a_commit_is_not_taken_for_another_receiver(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look at a table's first row says in the changelog how it is published, then asks where WAL is."""
    read, cuts = changelog_feed.written_lsn, list[LSN]()  # type: ignore[attr-defined]

    def cut_and_read(connection: Connection) -> LSN:
        if not cuts:
            cuts.append(received.source_lsn())
            end_connections(dsn)
        return read(connection)

    monkeypatch.setattr(changelog_feed, "written_lsn", cut_and_read)
    execute(dsn, "insert into t values (1, 'a')")
    with receiving(received) as reception:
        wait_until_seen(reception, received.source_lsn())
    assert cuts
    assert ids(received) == [1]


def test_a_start_that_is_lost_for_longer_than_an_outage_may_last_ends_it(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received = begun(dsn, tmp_path, reconnect_s=0.0)
    cut_once_the_slot_is_taken(received, monkeypatch)
    with receiving(received) as reception:
        assert reception.failed.wait(120)
        assert isinstance(reception.error, SourceConnectionError)


def test_start_raises_connection_error_when_first_connection_fails(received: Received) -> None:
    wrong = ReconnectingReceiver(received.dsn.replace("dbname=", "dbname=no_"), received.pipeline)
    with pytest.raises(SourceConnectionError, match="cannot connect"):
        wrong.start()
    wrong.stop()


def test_an_outage_that_lasts_ends_it(dsn: str, tmp_path: Path) -> None:
    received = begun(dsn, tmp_path, reconnect_s=1.0)
    name = dsn.split("dbname=")[1].split(maxsplit=1)[0]
    with closing_connection(dsn.replace(name, "postgres")) as admin, receiving(received) as reception:
        admin.cursor().execute(f"alter database {name} allow_connections false")
        try:
            began = time.monotonic()
            admin.cursor().execute(
                "select pg_terminate_backend(pid) from pg_stat_activity where datname = %s", (name,)
            )
            assert reception.failed.wait(120)
        finally:
            admin.cursor().execute(f"alter database {name} allow_connections true")
        assert time.monotonic() - began < 60, "the default limit is 60 s"
        assert isinstance(reception.error, SourceConnectionError)


def test_a_receiver_that_is_lost_at_once_each_time_is_one_outage(dsn: str, tmp_path: Path) -> None:
    received = begun(dsn, tmp_path, reconnect_s=5.0)
    with receiving(received) as reception:
        deadline = time.monotonic() + 120
        while not reception.failed.wait(0.02) and time.monotonic() < deadline:
            end_walsender(received)
        assert isinstance(reception.error, SourceConnectionError)


def test_without_time_to_connect_again_the_first_loss_ends_it(dsn: str, tmp_path: Path) -> None:
    received = begun(dsn, tmp_path, reconnect_s=0.0)
    with receiving(received) as reception:
        end_walsender(received)
        assert reception.failed.wait(20)
        assert isinstance(reception.error, SourceConnectionError)


def test_dropped_publication_ends_reconnecting_receiver(
    received: Received, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(changelog_feed, "_IDLE_LOOK_S", 0.1)
    with receiving(received) as reception:
        execute(dsn, f"drop publication {received.pipeline.publication}")
        assert reception.failed.wait(20)
        assert isinstance(reception.error, PublicationError)


def test_a_slot_that_another_has_taken_stays_its_own(received: Received, dsn: str) -> None:
    """The receiver that gets the slot continues, and the other one ends: never both."""
    with receiving(received) as reception:
        end_walsender(received)
        other = Receiver(dsn, received.pipeline)

        def started() -> bool:
            try:
                other.start()
            except (BusyError, FencedError):
                # Fenced: the first one had the slot again for a moment, and committed its fence in time.
                return False
            return True

        while not started():
            end_walsender(received)
        execute(dsn, "insert into t values (1, 'a')")
        wait_until(lambda: ids(received) == [1])
        assert reception.error is None or isinstance(reception.error, FencedError | BusyError)
        other.stop()


def test_a_new_fence_while_it_connects_again_is_respected(received: Received, dsn: str) -> None:
    with receiving(received) as reception:
        ChangelogWriter(received.changelog)
        execute(dsn, "insert into t values (1, 'a')")
        assert reception.failed.wait(20)
        assert isinstance(reception.error, FencedError)
    assert ids(received) == []


def test_receiver_fenced_while_disconnected_fails_with_fenced_error(
    received: Received,
) -> None:
    with receiving(received) as reception:
        ChangelogWriter(received.changelog)
        end_walsender(received)
        assert reception.failed.wait(20)
        assert isinstance(reception.error, FencedError)


@pytest.fixture
def locked(dsn: str) -> Iterator[StateDatabase]:
    """A store with the lock of replication, as an app has it."""
    with StateDatabase(dsn, "setup") as first:
        first.migrate()
        first.register(Pipeline(name="p", lake="/lake/p", tables=("public.t",)), "123", True, True)
    with closing(open_reconnecting_database(dsn, "test", 30.0, threading.Event().wait)) as state_db:
        state_db.lock("p", "replicate")
        yield state_db


def lose_connection(state_db: StateDatabase) -> None:
    inner = state_db._state_db  # type: ignore[attr-defined]
    inner._connection.close()


@pytest.mark.parametrize(
    "call", [lambda state_db: state_db.now(), lambda state_db: state_db.write_progress("p")]
)
def test_lock_is_taken_over_from_the_lost_session_that_the_server_takes_for_alive(
    dsn: str, locked: StateDatabase, call: Callable[[StateDatabase], object]
) -> None:
    """The server notices a failed network only when it has something to send."""
    pid = locked._state_db.session.pid  # type: ignore[attr-defined]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        lose_connection(locked)
        call(locked)
        with StateDatabase(dsn, "another") as other, pytest.raises(BusyError) as raised:
            other.lock("p", "replicate")
        assert f"database pid {pid}," not in raised.value.message
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize(
    "call", [lambda state_db: state_db.now(), lambda state_db: state_db.write_progress("p")]
)
def test_state_whose_lock_another_process_took_meanwhile_raises_at_once(
    dsn: str, locked: StateDatabase, call: Callable[[StateDatabase], object]
) -> None:
    lose_connection(locked)
    wait_until(lambda: not is_locked(dsn), what="the server to notice that the session is gone")
    with StateDatabase(dsn, "another") as other:
        other.lock("p", "replicate")
        with pytest.raises(BusyError, match="another process is at it already"):
            call(locked)


def is_locked(dsn: str) -> bool:
    with StateDatabase(dsn, "looking") as other:
        return other.is_locked("p", "replicate")


def test_keeper_takes_the_lock_of_an_idle_app_again_and_ends_it_when_another_process_has_it(
    dsn: str, locked: StateDatabase
) -> None:
    ended = threading.Event()
    with LockKeeper(locked, ended.set, interval_s=0.05):
        end_connections_of(dsn, "test")
        wait_until(lambda: is_locked(dsn), 20, "the lock to be taken again")
        assert not ended.is_set()
        while (other := holder(dsn)) is None:
            end_connections_of(dsn, "test")
        with other:
            assert ended.wait(20)


def holder(dsn: str) -> StateDatabase | None:
    """Another process that has the lock, if it is free."""
    state_db = StateDatabase(dsn, "another")
    try:
        state_db.lock("p", "replicate")
    except BusyError:
        state_db.close()
        return None
    return state_db


def end_connections_of(dsn: str, role: str) -> None:
    execute(
        dsn,
        "select pg_terminate_backend(pid, 100000) from pg_stat_activity where datname = current_database()"
        f" and application_name ~ 'pgrepl {role}|pgrepl replicate'",
    )


def test_closed_state_database_does_not_connect_again_for_a_thread_that_is_still_at_work(dsn: str) -> None:
    """It would take its locks again, and keep the next process out."""
    with StateDatabase(dsn, "setup") as first:
        first.migrate()
    state_db = open_reconnecting_database(dsn, "test", 30.0, threading.Event().wait)
    with closing(state_db):
        state_db.lock("p", "replicate")
    with pytest.raises(SourceConnectionError):
        state_db.read_tables("p")
    with StateDatabase(dsn, "next") as other:
        other.lock("p", "replicate")
