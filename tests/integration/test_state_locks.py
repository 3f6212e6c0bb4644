"""state/locks.py: a lock has one holder, which is named, and ends with its session."""

import contextlib
import hashlib
import math
import os
import socket
import threading

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    BusyError,
    Retry,
)
from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.operations.selection import wait_until_unlocked
from airflow_provider_pgrepl.replication.state.actor import STARTED_BY_VARIABLE
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.state_records import pipeline


def test_a_lock_is_held_by_one_and_names_the_holder(dsn, state_db):
    state_db.lock("shop", "replicate")
    with StateDatabase(dsn, "test") as second:
        holder = r"pgrepl replicate shop .+:\d+ \(database pid \d+, role postgres, from 127"
        with pytest.raises(BusyError, match=holder) as caught:
            second.lock("shop", "replicate")
        assert caught.value.retry is Retry.TIMED
        second.lock("shop", "snapshot")
        second.lock("other", "replicate")
        state_db.unlock("shop", "replicate")
        second.lock("shop", "replicate")
        with pytest.raises(BusyError):
            state_db.lock("shop", "replicate")


def test_busy_error_names_the_task_and_how_to_stop_the_holder(dsn, state_db, monkeypatch):
    monkeypatch.setenv(STARTED_BY_VARIABLE, "task copy of shop,\nrun 1")
    state_db.lock("shop", "snapshot")
    with StateDatabase(dsn, "test") as second, pytest.raises(BusyError) as raised:
        second.check_unlocked("shop", "snapshot")
    me = f"{socket.gethostname()}:{os.getpid()}"
    assert rf"pgrepl snapshot shop {me}, started by task copy of shop,\nrun 1 (" in raised.value.message
    assert raised.value.hint == (
        "if that process is the wanted one, nothing is to be done here. Otherwise to stop it, pause its DAG"
        " and mark its run as failed, or run on host"
        f" {socket.gethostname()}: kill {os.getpid()}, or wait until it has ended"
    )
    with StateDatabase(dsn, "test") as second:
        second.check_unlocked("shop", "replicate")
        second.check_unlocked("other", "snapshot")


def test_waiting_for_a_lock_names_the_holder_and_ends_with_it(dsn, state_db):
    access, said = Access(pipeline(), dsn, dsn), []
    state_db.lock("shop", "snapshot")
    wait_until_unlocked(
        access, "snapshot", math.inf, said.append, lambda _: state_db.unlock("shop", "snapshot")
    )
    assert len(said) == 1
    assert said[0].startswith("Waiting: pipeline shop: another process is at it already (snapshot): pgrepl")
    state_db.lock("shop", "replicate")
    with pytest.raises(BusyError):
        wait_until_unlocked(access, "replicate", 0.0, said.append, lambda _: None)


def test_a_lock_goes_with_its_connection(dsn, state_db):
    first = StateDatabase(dsn, "test")
    first.lock("shop", "replicate")
    first.close()
    while True:
        try:
            state_db.lock("shop", "replicate")
            break
        except BusyError:
            continue


def unprivileged(dsn, pg):
    """A connection of a role that may do nothing but connect."""
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists unprivileged; create role unprivileged login")
    connection = psycopg2.connect(dsn.replace("user=postgres", "user=unprivileged"))
    connection.autocommit = True
    return connection


def test_nobody_without_a_right_can_hold_a_lock(pg, dsn, state_db):
    """Any role may take advisory locks of any number, which must not block the store's locks."""
    other = unprivileged(dsn, pg)
    digest = hashlib.blake2b(b"pgrepl replicate shop", digest_size=8).digest()
    with other.cursor() as cursor:
        for key in (int.from_bytes(digest) >> 1, 0x7067726570, 0x706772657071):
            cursor.execute("select pg_advisory_lock(%s)", (key,))
    state_db.lock("shop", "replicate")
    with pytest.raises(BusyError), StateDatabase(dsn, "test") as second:
        second.lock("shop", "replicate")
    with pg.cursor() as cursor:
        cursor.execute("drop schema _pgrepl cascade")
    with StateDatabase(dsn, "test") as fresh:
        fresh.migrate()
    other.close()
    with pg.cursor() as cursor:
        cursor.execute("drop role unprivileged")


def test_a_lock_of_a_session_that_is_gone_holds_nobody(pg, dsn, state_db):
    """Also when another session has its process number now, or the row was written elsewhere."""
    with pg.cursor() as cursor:
        cursor.execute(
            "insert into _pgrepl.locks"
            " values ('shop', 'replicate', pg_backend_pid(), now() - interval '1 day', 'x')"
        )
    state_db.lock("shop", "replicate")
    with pg.cursor() as cursor:
        cursor.execute(
            "select count(*) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid() and (backend_xid is not null or backend_xmin is not null)"
        )
        assert cursor.fetchone() == (0,), "no transaction stays open for it"


@pytest.fixture
def limited(dsn, pg, state_db):
    """The DSN of a role that owns the state and may not see when sessions of other roles began."""
    with pg.cursor() as cursor:
        cursor.execute("drop role if exists limited; create role limited login")
        cursor.execute(
            "grant all on all tables in schema _pgrepl to limited; alter schema _pgrepl owner to limited"
        )
        cursor.execute(
            "select format('alter table _pgrepl.%I owner to limited', tablename)"
            " from pg_tables where schemaname = '_pgrepl'"
        )
        for (statement,) in cursor.fetchall():
            cursor.execute(statement)
    state_db.close()
    yield dsn.replace("user=postgres", "user=limited")
    with pg.cursor() as cursor:
        cursor.execute("drop schema _pgrepl cascade; drop role limited")


def lock_of(pg, pid, started):
    """A row that `pid` has left, whose session began at an SQL expression."""
    with pg.cursor() as cursor:
        cursor.execute(f"insert into _pgrepl.locks values ('shop', 'replicate', {pid}, {started}, 'x')")


WALWRITER = "(select pid from pg_stat_activity where backend_type = 'walwriter')"


BEFORE_THE_SERVER = "pg_postmaster_start_time() - interval '1 second'"


@pytest.mark.parametrize("pid", ["pg_backend_pid()", WALWRITER])
def test_lock_from_before_the_server_started_holds_nobody(pg, limited, pid):
    """In a container process numbers begin at 1 with each start: the holder's is soon another process's."""
    lock_of(pg, pid, BEFORE_THE_SERVER)
    with StateDatabase(limited, "test") as mine:
        assert not mine.is_locked("shop", "replicate")
        assert mine.held_by_others("shop") == []
        mine.lock("shop", "replicate")


def test_process_of_the_server_itself_holds_no_lock(pg, limited):
    """After a crash the server restarts its own processes, and its start stays what it was."""
    lock_of(pg, WALWRITER, "now()")
    with StateDatabase(limited, "test") as mine:
        assert not mine.is_locked("shop", "replicate")
        mine.lock("shop", "replicate")


def test_session_whose_start_is_hidden_counts_as_the_holder_and_the_hint_says_how_to_tell(pg, limited):
    lock_of(pg, "pg_backend_pid()", "now() - interval '1 millisecond'")
    with StateDatabase(limited, "test") as mine:
        assert mine.is_locked("shop", "replicate")
        with pytest.raises(BusyError) as raised:
            mine.lock("shop", "replicate")
    assert "another session, of role postgres" in raised.value.hint
    assert "GRANT pg_read_all_stats" in raised.value.hint
    with pg.cursor() as cursor:
        cursor.execute("grant pg_read_all_stats to limited")
    with StateDatabase(limited, "test") as mine:
        mine.lock("shop", "replicate")


def test_two_who_want_a_lock_at_once_do_not_both_get_it(dsn, state_db):
    taken, barrier = [], threading.Barrier(8)

    def take():
        with StateDatabase(dsn, "test") as mine:
            barrier.wait()
            with contextlib.suppress(BusyError):
                mine.lock("shop", "replicate")
                taken.append(mine)
            barrier.wait()

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
