"""Slots of a standby, and copies from it, which give way to replay and are tried again when it ends them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import PgReplError, SnapshotError, TableSnapshotError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.copy.copy_stream import open_copy
from airflow_provider_pgrepl.replication.source.copy.imported_snapshot import export_again
from airflow_provider_pgrepl.replication.source.copy.snapshot_holder import SnapshotHolder, keep
from airflow_provider_pgrepl.replication.source.slot_creation import export_snapshot
from demo.postgres import Server
from tests.conftest import running_server
from tests.support.replicated import execute, wait_until
from tests.support.standby import silent, standby_of

ROWS = 200_000
RANGE_BYTES = 1 << 30


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[Server, Server]]:
    """A primary, and a standby whose replay waits for queries without end."""
    with running_server(18) as primary, standby_of(primary) as standby:
        set_delay(standby, "-1")
        yield primary, standby


def set_delay(standby: Server, delay: str) -> None:
    execute(
        standby.dsn(), f"alter system set max_standby_streaming_delay = '{delay}'", "select pg_reload_conf()"
    )


@pytest.fixture
def primary(pair: tuple[Server, Server]) -> Server:
    primary, standby = pair
    execute(
        primary.dsn(),
        "drop table if exists t",
        "create table t (id int primary key, v text)",
        f"insert into t select g, repeat('v', 100) from generate_series(1, {ROWS}) g",
        "vacuum t",
    )
    wait_until_replayed(primary, standby)
    return primary


@pytest.fixture
def standby(pair: tuple[Server, Server]) -> Iterator[Server]:
    yield pair[1]
    set_delay(pair[1], "-1")


def wait_until_replayed(primary: Server, standby: Server) -> None:
    with closing(psycopg2.connect(primary.dsn())) as connection, connection.cursor() as cursor:
        cursor.execute("select pg_current_wal_insert_lsn()")
        (lsn,) = cursor.fetchone() or ("",)
    with closing(psycopg2.connect(standby.dsn())) as connection, connection.cursor() as cursor:
        connection.autocommit = True

        def is_replayed() -> bool:
            cursor.execute("select pg_last_wal_replay_lsn() >= %s", (lsn,))
            return bool((cursor.fetchone() or (False,))[0])

        wait_until(is_replayed, 60, "the replay of the primary's changes")


@contextmanager
def keeping(dsn: str) -> Iterator[SnapshotHolder]:
    with closing(connect(dsn, "test")) as exporter:
        exporter.cursor().execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        relation = find_relation(exporter, TableName("public", "t"))
        assert relation is not None
        with keep(dsn, export_again(exporter), [relation], None, 60.0, trusts_owners=True) as keeper:
            exporter.close()
            yield keeper


def test_slot_of_a_standby_is_created_when_its_primary_is_asked_to_log(primary, standby, server):
    execute(
        primary.dsn(),
        "create role asks login",
        "grant execute on function pg_log_standby_snapshot() to asks",
    )
    elsewhere = primary.dsn().replace(f"port={primary.port}", "port=1")
    asking = primary.dsn(user="asks")
    with silent(primary):
        with pytest.raises(SnapshotError, match="a standby, and waits until") as caught:
            export_snapshot(standby.dsn(), "waits", timeout_s=3)
        assert "pg_log_standby_snapshot" in caught.value.hint
        with pytest.raises(SnapshotError, match=r"does not: .*port 1"):
            export_snapshot(standby.dsn(), "waits", timeout_s=3, primary_dsn=elsewhere)
        with pytest.raises(SnapshotError, match="does not lead to this standby's primary"):
            export_snapshot(standby.dsn(), "waits", timeout_s=3, primary_dsn=server.dsn())
        export_snapshot(standby.dsn(), "made", timeout_s=120, primary_dsn=asking).close()
        with closing(psycopg2.connect(primary.dsn())) as writing, writing.cursor() as cursor:
            cursor.execute("insert into t values (0, 'open')")
            with pytest.raises(
                SnapshotError, match="waits for transactions that run on the primary"
            ) as caught:
                export_snapshot(standby.dsn(), "waits", timeout_s=5, primary_dsn=asking)
        assert "pg_prepared_xacts" in caught.value.hint


def test_copy_gives_way_to_replay_of_ddl(primary, standby):
    """Queries of the standby queue behind the replay, which no backend of pg_blocking_pids is."""
    with keeping(standby.dsn()) as keeper, keeper.hold(keeper.relations[0]) as held:
        execute(primary.dsn(), "alter table t add later int")
        wait_until_replayed(primary, standby)
        with pytest.raises(TableSnapshotError, match="the copy was given up for STANDBY REPLAY of pid"):
            held.check()


@pytest.mark.thorough("test_copy_gives_way_to_replay_of_ddl")
def test_copy_gives_way_to_replay_that_needs_an_index(primary, standby):
    """Planning a range's query has locked it."""
    with keeping(standby.dsn()) as keeper, keeper.hold(keeper.relations[0]) as held:
        first, *more = held.plan(keeper.relations[0], 1 << 20)
        assert more
        with suppress(PgReplError), open_copy(standby.dsn(), held.snapshot, first) as stream:
            stream.read(10)
            execute(primary.dsn(), "reindex index t_pkey")
            wait_until_replayed(primary, standby)
        with pytest.raises(TableSnapshotError, match="the copy was given up for STANDBY REPLAY of pid"):
            held.check()


@pytest.mark.parametrize("sql", ["delete from t where id < 100; vacuum t", "alter table t add later int"])
@pytest.mark.thorough("the same test, of rows that VACUUM removes", "alter table t add later int")
def test_table_is_copied_again_when_replay_has_ended_its_sessions(primary, standby, sql):
    set_delay(standby, "0")
    with keeping(standby.dsn()) as keeper, keeper.hold(keeper.relations[0]) as held:
        first, *_ = held.plan(keeper.relations[0], RANGE_BYTES)
        with (
            pytest.raises(TableSnapshotError, match="conflict with recovery"),
            open_copy(standby.dsn(), held.snapshot, first) as stream,
        ):
            stream.read(10)
            for statement in sql.split("; "):
                execute(primary.dsn(), statement)
            # A backend whose client does not read cannot be canceled, so that replay would wait for the test.
            wait_until(lambda: not stream.read(1 << 16))
        with pytest.raises(TableSnapshotError):
            held.plan(keeper.relations[0], RANGE_BYTES)
        with pytest.raises(TableSnapshotError):
            held.check()
