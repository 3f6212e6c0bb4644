import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    PrivilegeError,
    Retry,
    ServerSettingError,
    SlotError,
    SnapshotError,
)
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source import slot_creation
from airflow_provider_pgrepl.replication.source.connection import connect_replication
from airflow_provider_pgrepl.replication.source.preflight.check import server_problems
from airflow_provider_pgrepl.replication.source.server import read_server
from airflow_provider_pgrepl.replication.source.slot import drop_slot, read_slot
from airflow_provider_pgrepl.replication.source.slot_creation import create_slot, export_snapshot
from tests.support.own_server import running_server
from tests.support.replicated import has_no_sender, wait_until


@pytest.fixture
def name():
    return f"s_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def writer(pg, dsn):
    """A transaction that has written and stays open."""
    with pg.cursor() as cursor:
        cursor.execute("create table busy (a int)")
    connection = psycopg2.connect(dsn + " application_name=long_writer")
    with connection.cursor() as cursor:
        cursor.execute("insert into busy values (1)")
    yield connection
    connection.close()


@pytest.mark.differs_by_major(
    "options of CREATE_REPLICATION_SLOT in parentheses since 15, pg_replication_slots.conflicting since 16,"
    " invalidation_reason since 17"
)
def test_the_snapshot_shows_what_was_committed_before(pg, dsn, name):
    with pg.cursor() as cursor:
        cursor.execute("create table t (a int); insert into t values (1)")
        with create_slot(dsn, name, timeout_s=30) as exported:
            cursor.execute("insert into t values (2)")
            with psycopg2.connect(dsn) as reader, reader.cursor() as old:
                old.execute("begin isolation level repeatable read")
                old.execute("set transaction snapshot %s", (exported.snapshot,))
                old.execute("select a from t")
                assert old.fetchall() == [(1,)]
            reader.close()
            assert isinstance(exported.consistent_point, LSN)
            assert abs(datetime.now(UTC) - exported.exported_at) < timedelta(minutes=1)
            assert exported.exported_at.utcoffset() == timedelta(0)
    slot = read_slot(pg, name)
    assert (slot.name, slot.plugin, slot.active, slot.active_pid) == (name, "pgoutput", False, None)
    assert slot.confirmed_flush_lsn == exported.consistent_point
    assert slot.restart_lsn <= slot.confirmed_flush_lsn
    assert (slot.wal_status, slot.invalidation) == ("reserved", None)
    drop_slot(pg, name)


@pytest.mark.differs_by_major("options of CREATE_REPLICATION_SLOT in parentheses since 15", since=(15,))
def test_a_temporary_slot_goes_when_it_is_closed(pg, dsn, name):
    with export_snapshot(dsn, name, timeout_s=30) as exported:
        assert read_slot(pg, name).active
    assert read_slot(pg, name) is None
    exported.close()


def test_dropping_is_idempotent(pg, dsn, name):
    create_slot(dsn, name, timeout_s=30).close()
    drop_slot(pg, name)
    drop_slot(pg, name)
    assert read_slot(pg, name) is None


@pytest.mark.parametrize("make", [create_slot, export_snapshot])
def test_a_long_writer_is_named_and_no_slot_stays(pg, dsn, name, writer, make):
    with writer.cursor() as cursor:
        cursor.execute("select pg_current_xact_id()::text")
        xid = cursor.fetchone()[0]
    started = time.monotonic()
    with pytest.raises(SnapshotError) as caught:
        make(dsn, name, timeout_s=1)
    assert time.monotonic() - started < 120
    assert f"pid {writer.info.backend_pid} (transaction {xid}," in str(caught.value)
    assert "long_writer" in str(caught.value)
    assert caught.value.retry is Retry.TIMED
    assert read_slot(pg, name) is None
    writer.commit()
    export_snapshot(dsn, name, timeout_s=30).close()


def test_a_writer_that_ends_in_time_does_no_harm(pg, dsn, name, writer):
    def end_when_the_slot_waits():
        def is_waiting():
            with pg.cursor() as cursor:
                cursor.execute(
                    "select 1 from pg_locks where locktype = 'transactionid' and not granted and pid in"
                    " (select active_pid from pg_replication_slots where slot_name = %s)",
                    (name,),
                )
                return cursor.fetchone()

        wait_until(is_waiting, what="the slot to wait for the writer")
        writer.commit()

    ender = threading.Thread(target=end_when_the_slot_waits)
    ender.start()
    with export_snapshot(dsn, name, timeout_s=300) as exported:
        assert exported.snapshot
    ender.join()


def test_a_name_that_is_taken_says_by_whom(pg, dsn, name):
    with pg.cursor() as cursor:
        cursor.execute("select pg_create_physical_replication_slot(%s)", (name,))
    with pytest.raises(SlotError, match=f"named {name} exists already with plugin None in database None"):
        create_slot(dsn, name, timeout_s=30)
    with pytest.raises(SlotError, match="is a physical slot"):
        drop_slot(pg, name)
    with pg.cursor() as cursor:
        cursor.execute("select pg_drop_replication_slot(%s)", (name,))
    with export_snapshot(dsn, name, timeout_s=30):
        database = pg.info.dbname
        with pytest.raises(SlotError, match=f"plugin pgoutput in database {database}, read by pid"):
            create_slot(dsn, name, timeout_s=30)


def test_a_slot_in_use_is_not_dropped(pg, dsn, name):
    with pg.cursor() as cursor:
        cursor.execute("create publication p")
    create_slot(dsn, name, timeout_s=30).close()
    stream = connect_replication(dsn, "test")
    stream.cursor().start_replication(
        slot_name=name, options={"proto_version": "1", "publication_names": "p"}
    )
    wait_until(lambda: read_slot(pg, name).active, what="the slot to be read")
    with pytest.raises(BusyError, match=rf"read by pid {stream.info.backend_pid}"):
        drop_slot(pg, name)
    stream.close()
    wait_until(lambda: not read_slot(pg, name).active, what="the slot to be free")
    drop_slot(pg, name)


def test_a_temporary_name_that_is_taken_says_to_wait(pg, dsn, name):
    with export_snapshot(dsn, name, timeout_s=30), pytest.raises(SlotError) as caught:
        export_snapshot(dsn, name, timeout_s=30)
    assert "run the command again" in caught.value.hint


@pytest.mark.parametrize("loses_connection", [False, True])
def test_interrupted_slot_creation_leaves_no_slot(pg, dsn, name, monkeypatch, loses_connection):
    def interrupted(*_, **__):
        if loses_connection:
            with pg.cursor() as cursor:
                cursor.execute(
                    "select pg_terminate_backend(pid) from pg_stat_activity"
                    " where application_name = 'pgrepl slot control' and datname = current_database()"
                )
        raise KeyboardInterrupt

    monkeypatch.setattr(slot_creation, "export_snapshot", interrupted)
    with pytest.raises(KeyboardInterrupt):
        create_slot(dsn, name, timeout_s=30)
    assert read_slot(pg, name) is None


def test_an_interrupt_when_the_slot_is_just_made_drops_it(pg, dsn, name, monkeypatch):
    join = threading.Thread.join

    def interrupted(thread, timeout=None):
        join(thread, timeout)
        if thread.name.startswith("create slot"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            create_slot(dsn, name, timeout_s=30)
    assert read_slot(pg, name) is None


def test_a_role_without_replication_is_refused(pg, dsn, name):
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists noslot; create role noslot login")
    with pytest.raises(PrivilegeError):
        create_slot(dsn.replace("user=postgres", "user=noslot"), name, timeout_s=30)
    with pg.cursor() as cursor:
        cursor.execute("drop role noslot")


@pytest.fixture(scope="module")
def narrow_server():
    """A server with one slot and one sender."""
    with running_server(max_replication_slots="1", max_wal_senders="2") as server:
        yield server


def test_no_free_slot_names_the_setting(narrow_server):
    with (
        export_snapshot(narrow_server.dsn(), "first", timeout_s=30),
        pytest.raises(ServerSettingError, match="max_replication_slots"),
    ):
        export_snapshot(narrow_server.dsn(), "second", timeout_s=30)


def test_preflight_counts_the_temporary_slot_as_well(narrow_server):
    connection = psycopg2.connect(narrow_server.dsn())
    connection.autocommit = True
    server = read_server(connection)
    connection.cursor().execute("select pg_create_logical_replication_slot('own', 'pgoutput')")
    (problem,) = server_problems(connection, server, "own", makes_slot=True)
    assert "1 of max_replication_slots = 1 exist, and 1 more is needed" in problem.message
    assert list(server_problems(connection, server, "own", makes_slot=False)) == []
    connection.cursor().execute("select pg_drop_replication_slot('own')")
    (problem,) = server_problems(connection, server, "own")
    assert "2 more are needed" in problem.message
    connection.close()


def test_no_free_sender_names_the_setting(narrow_server):
    wait_until(lambda: has_no_sender(narrow_server), what="senders to end")
    held = [connect_replication(narrow_server.dsn(), "test") for _ in range(2)]
    with pytest.raises(ServerSettingError, match="max_wal_senders"):
        export_snapshot(narrow_server.dsn(), "third", timeout_s=30)
    for connection in held:
        connection.close()
