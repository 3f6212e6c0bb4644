"""Statements of the application go first: the copy of their table ends, and is made again later."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from types import SimpleNamespace
from typing import Any, cast

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import (
    PgReplError,
    SnapshotError,
    SourceConnectionError,
    TableSnapshotError,
)
from airflow_provider_pgrepl.replication.app.copy_states import record_tables
from airflow_provider_pgrepl.replication.lake.snapshot.snapshot_copy import SnapshotCopy
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source import connection
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import abandon, connect
from airflow_provider_pgrepl.replication.source.copy import imported_snapshot, lock_watch
from airflow_provider_pgrepl.replication.source.copy.copy_stream import open_copy
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import (
    SnapshotHolder,
    TableSnapshotHolder,
    keep,
)
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from tests.support.application import HANGS_S, Application, waits
from tests.support.changelogs import epoch_record
from tests.support.replicated import wait_until

RANGE_BYTES = 300_000


@pytest.fixture
def tables(run: object) -> None:
    run(  # type: ignore[operator]
        "create table t (id int primary key, v text)",
        "create index t_v on t (v)",
        "insert into t select g, repeat('v', 100) from generate_series(1, 20000) g",
        "create table other (id int primary key)",
        "create table part (id int primary key) partition by range (id)",
        "create table part_1 partition of part for values from (0) to (10000)",
        "create table part_2 partition of part for values from (10000) to (20001)",
        "insert into part select generate_series(0, 20000)",
        "create publication p for table t, part with (publish_via_partition_root)",
    )


@contextmanager
def keeping(dsn: str, pg: psycopg2.extensions.connection, *names: str) -> Iterator[SnapshotHolder]:
    relations: list[Relation] = [find_relation(pg, TableName("public", name), "p") for name in names]  # type: ignore[misc]
    with (
        export_snapshot(dsn, f"s_{uuid.uuid4().hex[:12]}", timeout_s=30) as exported,
        keep(dsn, exported.snapshot, relations, "p", 60.0, trusts_owners=True) as keeper,
    ):
        exported.close()
        yield keeper


STATEMENTS = {
    "alter table t add later int": "t",
    "truncate t": "t",
    "vacuum full t": "t",
    "drop index t_v": "t",
    "reindex index t_v": "t",
    "reindex index concurrently t_v": "t",
    "create index concurrently on other (id)": "t",
    "alter table part_2 add check (id > 0)": "part",
    "alter table part detach partition part_1 concurrently": "part",
    "drop table part": "part",
}


@pytest.mark.differs_by_major("which locks and snapshots DDL waits for")
@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.thorough(
    "the same test, of ALTER TABLE, DROP INDEX, and CREATE INDEX and DETACH CONCURRENTLY",
    "truncate t",
    "vacuum full t",
    "reindex index t_v",
    "reindex index concurrently t_v",
    "alter table part_2 add check (id > 0)",
    "drop table part",
)
def test_statement_goes_before_the_copy_of_its_table(pg, dsn, tables, statement):
    with keeping(dsn, pg, STATEMENTS[statement]) as keeper, keeper.hold(keeper.relations[0]) as held:
        first, *_ = held.plan(keeper.relations[0], RANGE_BYTES)
        with (
            suppress(PgReplError),  # a range that was read by then is not used either
            open_copy(dsn, held.snapshot, first) as stream,
        ):
            stream.read(10)
            application = Application(dsn, statement)
            wait_until(lambda: waits(pg, application.pid) or not application.is_alive())
            application.assert_done()
            with pytest.raises(SnapshotError) as caught:
                held.check()
            while stream.read(1 << 20):
                pass
    assert isinstance(caught.value, TableSnapshotError)
    command = " ".join(statement.upper().split()[:2])
    named = f"{command} of pid {application.pid} (role postgres, application migration, waiting for "
    assert f"the copy was given up for {named}" in caught.value.message


def test_table_is_given_up_before_its_copy_is_planned(pg, dsn, tables):
    with keeping(dsn, pg, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        Application(dsn, "alter table t add later int").assert_done()
        with pytest.raises(TableSnapshotError, match="given up for ALTER TABLE"):
            held.plan(held.relation, RANGE_BYTES)


def test_snapshot_is_given_up_before_a_table_is_copied(pg, dsn, tables):
    with keeping(dsn, pg, "t") as keeper:
        Application(dsn, "create index concurrently on other (id)").assert_done()
        for use in (lambda: keeper.hold(keeper.relations[0]), lambda: keeper.sessions(4)):
            with pytest.raises(SnapshotError, match="given up for CREATE INDEX"):
                use()


def test_snapshot_that_is_given_up_before_the_copies_begin_fails_no_table(pg, dsn, tables, tmp_path):
    """A statement may wait for the snapshot while Spark starts."""
    pipeline = Pipeline(name="p", lake=str(tmp_path), tables=("public.t",))
    record, unused = epoch_record(1, consistent_point=100), cast(Any, None)
    exported: Any = SimpleNamespace(consistent_point=record.consistent_point)
    with keeping(dsn, pg, "t") as keeper:
        copy = SnapshotCopy(unused, dsn, pipeline, unused, record, keeper, exported)
        Application(dsn, "create index concurrently on other (id)").assert_done()
        of_rows = copy.run()
        without_rows = record_tables(pipeline, unused, unused, record, keeper, exported)
    for result in (of_rows, without_rows):
        assert "given up for CREATE INDEX" in str(result.lost)
        assert not result.failed


def test_catalog_is_not_read_from_a_session_that_the_server_has_ended(pg, dsn, run, tables, monkeypatch):
    monkeypatch.setattr(lock_watch, "POLL_S", HANGS_S)
    with keeping(dsn, pg, "t") as keeper:
        run(f"select pg_terminate_backend({keeper.connection.info.backend_pid}, 100000)")
        with pytest.raises(SnapshotError, match="connection that kept the snapshot was lost"):
            keeper.sessions(4)


def test_server_ends_the_sessions_of_a_process_that_hangs(pg, dsn, tables, monkeypatch):
    """The gate goes first: a copy that began later would read what a rewriting ALTER has left."""
    monkeypatch.setattr(lock_watch, "POLL_S", HANGS_S)
    monkeypatch.setattr(connection, "IDLE_LIMIT_S", 2)
    monkeypatch.setattr(imported_snapshot, "GATE_IDLE_LIMIT_S", 0.5)
    with keeping(dsn, pg, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        first, *_ = held.plan(keeper.relations[0], RANGE_BYTES)
        Application(dsn, "alter table t alter id type bigint").assert_done()
        with pytest.raises(SnapshotError, match="snapshot is gone"), open_copy(dsn, held.snapshot, first):
            pass
        with pytest.raises(TableSnapshotError, match="connection that kept the snapshot was lost"):
            held.check()


def test_server_ends_a_copy_that_nobody_reads(pg, dsn, run, tables, monkeypatch):
    """The reader's host may have vanished: keepalives do not detect that while bytes are unacknowledged."""
    monkeypatch.setitem(connection.PINNED_SETTINGS, "tcp_user_timeout", "1000")
    run("insert into t select g, repeat('v', 100) from generate_series(20001, 200000) g")
    with keeping(dsn, pg, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        (whole,) = held.plan(keeper.relations[0], 1 << 30)
        with (
            pytest.raises(SourceConnectionError, match="check the network and the server"),
            open_copy(dsn, held.snapshot, whole) as stream,
        ):
            stream.read(10)
            wait_until(lambda: not sessions(pg, f"pgrepl copy {held.snapshot}"))
            while stream.read(1 << 20):
                pass


def test_range_that_begins_behind_a_waiting_statement_fails_at_once(pg, dsn, tables, monkeypatch):
    """Were it to wait, it would wait for the statement, which waits for the session that keeps the table."""
    monkeypatch.setattr(lock_watch, "POLL_S", HANGS_S)
    with keeping(dsn, pg, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        first, *_ = held.plan(keeper.relations[0], RANGE_BYTES)
        application = Application(dsn, "alter table t add later int")
        wait_until(lambda: waits(pg, application.pid))
        with pytest.raises(TableSnapshotError), open_copy(dsn, held.snapshot, first):
            pass
        held.close()
        application.assert_done()


def test_range_cannot_begin_once_its_table_was_given_up(pg, dsn, tables):
    """A rewriting ALTER that came between would leave it an empty table, without an error."""
    with keeping(dsn, pg, "t") as keeper:
        with keeper.hold(keeper.relations[0]) as held:
            first, *_ = held.plan(keeper.relations[0], RANGE_BYTES)
        with pytest.raises(SnapshotError, match="snapshot is gone"), open_copy(dsn, held.snapshot, first):
            pass


def test_transaction_that_locks_partitions_one_by_one_is_never_a_deadlocks_victim(pg, dsn, tables):
    """Were one partition locked while another is waited for, the two would wait for each other."""
    with keeping(dsn, pg, "part") as keeper, closing(psycopg2.connect(dsn)) as migration:
        cursor = migration.cursor()
        cursor.execute("set statement_timeout = '60s'; lock table part_2 in access exclusive mode")
        held = list[TableSnapshotHolder]()
        holding = threading.Thread(target=lambda: held.append(keeper.hold(keeper.relations[0])), daemon=True)
        holding.start()
        wait_until(lambda: sessions(pg, "pgrepl keeper") >= 2)
        cursor.execute("lock table part_1 in access exclusive mode")
        migration.commit()
        holding.join(HANGS_S)
        held[0].close()


def sessions(pg, name):
    with pg.cursor() as cursor:
        cursor.execute("select pg_stat_clear_snapshot()")
        cursor.execute(
            "select count(*) from pg_stat_activity where application_name = %s"
            " and datname = current_database()",
            (name,),
        )
        return cursor.fetchone()[0]


def test_table_that_waits_for_its_turn_is_not_locked(pg, dsn, run, tables):
    with keeping(dsn, pg, "t", "part") as keeper, keeper.hold(keeper.relations[0]):
        run("set lock_timeout = '10s'", "alter table part add later int")
        with pytest.raises(TableSnapshotError, match=r"public\.part: altered after the snapshot"):
            keeper.hold(keeper.relations[1])


def test_application_reads_and_writes_a_table_that_is_copied(pg, dsn, run, tables):
    with keeping(dsn, pg, "t") as keeper, keeper.hold(keeper.relations[0]) as held:
        ranges = held.plan(keeper.relations[0], RANGE_BYTES)
        with open_copy(dsn, held.snapshot, ranges[0]) as stream:
            stream.read(10)
            run(
                "set lock_timeout = '10s'",
                "select count(*) from t",
                "insert into t values (0, 'new')",
                "update t set v = 'other' where id = 1",
                "delete from t where id = 2",
                "analyze t",
                "vacuum t",
            )
            while stream.read(1 << 20):
                pass
        held.check()


def test_backend_that_waits_for_a_lock_ends_with_its_client(pg, dsn, run, tables):
    run("begin", "lock table t in access exclusive mode")
    left = connect(dsn, "test")
    pid = left.info.backend_pid
    waiting = threading.Thread(target=lambda: _ignore(left, "select from public.t"), daemon=True)
    waiting.start()
    wait_until(lambda: waits(pg, pid))
    abandon(left)
    with pg.cursor() as cursor:

        def is_gone() -> bool:
            cursor.execute("select pg_stat_clear_snapshot()")
            cursor.execute("select 1 from pg_stat_activity where pid = %s", (pid,))
            return not cursor.fetchall()

        wait_until(is_gone)
    run("rollback")


def _ignore(connection: psycopg2.extensions.connection, sql: str) -> None:
    with pytest.raises(psycopg2.Error):
        connection.cursor().execute(sql)
