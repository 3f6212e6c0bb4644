"""Locks of several tables: no transaction of the application waits for all, or fails by a deadlock."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import BusyError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.copy import lock_watch
from airflow_provider_pgrepl.replication.source.publication import (
    add_tables,
    create_publication,
    drop_publication,
    drop_tables,
    read_publication,
)
from tests.conftest import closing_connection
from tests.integration.test_creek_functions import prepare
from tests.integration.test_ddl_amid_copy import HANGS_S
from tests.integration.test_lent_locks import CUT, keeping
from tests.integration.test_publication import relation
from tests.support.replicated import wait_until

TABLES = ("a", "b", "c")
LEAVES = ("part_0", "part_1", "part_2", "part_3")


@pytest.fixture
def tables(run) -> None:
    run(
        *(f"create table {name} (id int primary key)" for name in TABLES),
        "create table part (id int) partition by range (id)",
        *(
            f"create table {name} partition of part for values from ({name[-1]}) to ({name[-1]} + 1)"
            for name in LEAVES
        ),
    )


@contextmanager
def transaction(dsn: str, statement: str) -> Iterator[psycopg2.extensions.cursor]:
    """A transaction of the application that has run a statement, and is rolled back."""
    with closing_connection(f"{dsn} application_name=migration") as connection:
        cursor = connection.cursor()
        cursor.execute(f"begin; {statement}")
        yield cursor


def waits_for_a_transaction(pg) -> bool:
    with pg.cursor() as cursor:
        cursor.execute("select 1 from pg_locks where not granted and locktype = 'transactionid'")
        return cursor.fetchone() is not None


def waits(pg, table: str, seconds: float = 0) -> bool:
    """Return True if a session of this package has waited `seconds` for a lock on a table, by the server's
    clock.
    """
    with pg.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_locks join pg_stat_activity using (pid) where not granted"
            " and relation = %s::regclass and application_name <> 'migration'"
            " and clock_timestamp() - waitstart >= make_interval(secs => %s)",
            (table, seconds),
        )
        return bool(cursor.fetchall())


def published(pg, name: str) -> set[str]:
    found = read_publication(pg, name)
    return set() if found is None else {table.name for table in found.tables}


def test_table_leaves_before_the_lock_on_the_next_is_waited_for(pg, dsn, run, tables):
    run("create publication p for table a, b, c")
    with (
        ThreadPoolExecutor(1) as pool,
        closing_connection(dsn) as connection,
        transaction(dsn, "alter table c add later int") as migration,
    ):
        leaving = pool.submit(
            drop_tables, connection, "p", [TableName("public", name) for name in TABLES], 60
        )
        wait_until(lambda: waits(pg, "c"))
        migration.execute("lock table a, b in access exclusive mode nowait; commit")
        assert len(leaving.result()) == 3
    assert published(pg, "p") == set()


def test_tables_that_wait_for_a_lock_are_not_held_while_a_publication_is_created(pg, dsn, tables):
    with (
        ThreadPoolExecutor(1) as pool,
        closing_connection(dsn) as connection,
        transaction(dsn, "alter table c add later int") as migration,
    ):
        relations = [relation(pg, name) for name in TABLES]
        creating = pool.submit(create_publication, connection, "p", relations, 60)
        wait_until(lambda: waits(pg, "c"))
        migration.execute("lock table a, b in access exclusive mode nowait; commit")
        creating.result()
    assert published(pg, "p") == set(TABLES)


def test_publication_of_creek_is_made_at_once_and_its_locks_are_waited_for_shortly(pg, dsn, run, tables):
    run("create table child (primary key (id)) inherits (b)", "alter table part add primary key (id)")
    with (
        ThreadPoolExecutor(1) as pool,
        transaction(dsn, "alter table child add later int") as migration,
    ):
        making = pool.submit(prepare, dsn, "public.a, public.b, public.part")
        wait_until(lambda: waits(pg, "child"))
        migration.execute("lock table a, b, part in access exclusive mode; commit")
        making.result(HANGS_S)
    assert published(pg, "creek_pub") == {"a", "b", "child", "part"}


def test_publication_of_creek_gives_its_locks_back_while_another_session_makes_one_of_its_name(
    pg, dsn, tables
):
    with (
        ThreadPoolExecutor(1) as pool,
        transaction(dsn, "create publication creek_pub for table c") as other,
    ):
        making = pool.submit(prepare, dsn, "public.a")
        wait_until(lambda: waits_for_a_transaction(pg))
        other.execute("set local lock_timeout = '5s'; alter table a add later int")
        other.execute("rollback")
        making.result(HANGS_S)
    assert published(pg, "creek_pub") == {"a"}


def test_locks_of_partitions_are_waited_for_no_longer_than_one_lock(pg, dsn, run, tables):
    """The writer would fail if each partition's lock could be waited for as long as a single lock."""
    run("create publication p for table a with (publish_via_partition_root)")
    while not waits_for_two_partitions_in_turn(pg, dsn):
        run("alter publication p drop table part")


def waits_for_two_partitions_in_turn(pg, dsn) -> bool:
    """Add a partitioned table; return False if the first lock was released too late for what is tested."""
    with (
        transaction(dsn, "update part_3 set id = id") as writer,
        transaction(dsn, "lock table part_1 in row exclusive mode") as first,
        transaction(dsn, "lock table part_2 in row exclusive mode") as second,
        ThreadPoolExecutor(2) as pool,
    ):
        joining = pool.submit(add_tables, dsn, "p", [relation(pg, "part")], 60)
        wait_until(lambda: waits(pg, "part_1"))
        waiting = pool.submit(writer.execute, "update part_0 set id = id")
        wait_until(lambda: waits(pg, "part_1", 0.4) or waiting.done())
        first.execute("rollback")
        wait_until(lambda: waits(pg, "part_2") or waiting.done())
        in_turn = not waiting.done()
        wait_until(lambda: waits(pg, "part_2", 0.4) or waiting.done())
        second.execute("rollback")
        waiting.result(HANGS_S)
        writer.execute("commit")
        assert len(joining.result(HANGS_S)) == 1
    return in_turn


@pytest.mark.parametrize("statement", ["drop table a", "drop table c"])
def test_dropped_publication_waits_for_no_transaction_that_dropped_a_table(pg, dsn, run, tables, statement):
    """While it waited, it would hold what DROP TABLE of the others needs."""
    run("create publication p for table a, b, c")
    with (
        ThreadPoolExecutor(1) as pool,
        closing_connection(f"{dsn} application_name=dropping") as connection,
        transaction(dsn, "drop table b") as migration,
    ):
        dropping = pool.submit(drop_publication, connection, "p", 60)
        wait_until(lambda: has_begun(pg))
        migration.execute(f"set lock_timeout = '10s'; {statement}; commit")
        dropping.result(HANGS_S)
    assert read_publication(pg, "p") is None


def has_begun(pg) -> bool:
    with pg.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_stat_activity where application_name = 'dropping'"
            " and (query like '%DROP PUBLICATION%' or query = 'ROLLBACK')"
        )
        return bool(cursor.fetchall())


def test_publication_that_cannot_be_dropped_is_named(pg, dsn, run, tables):
    run("create publication p for table a, b, c")
    with (
        closing_connection(dsn) as connection,
        transaction(dsn, "drop table b"),
        pytest.raises(BusyError, match=r"publication p was not dropped within 0\.1 s"),
    ):
        drop_publication(connection, "p", 0.1)


def test_lock_against_owners_is_not_waited_for(pg, dsn, run, tables, monkeypatch):
    """The copy holds other locks on the partitions, so that the migration would fail by a deadlock."""
    monkeypatch.setattr(lock_watch, "POLL_S", HANGS_S)
    owner = f"owner_{uuid.uuid4().hex[:8]}"
    run(
        f"create role {owner}",
        *(f"alter table {name} owner to {owner}" for name in ("part", *LEAVES)),
        "insert into part select g % 4 from generate_series(1, 40000) g",
        "create publication p for table part with (publish_via_partition_root)",
    )
    try:
        with (
            keeping(dsn, pg, "part") as keeper,
            keeper.hold(keeper.relations[0]) as held,
            transaction(dsn, "create index on part_0 (id)") as migration,
            ThreadPoolExecutor(1) as pool,
        ):
            altering = pool.submit(migration.execute, "truncate part_1; commit")
            wait_until(lambda: is_waiting(pg))
            assert {part.is_planned for part in held.plan(held.relation, CUT)} == {False}
            held.close()
            altering.result(HANGS_S)
    finally:
        run(f"drop owned by {owner} cascade", f"drop role {owner}")


def is_waiting(pg) -> bool:
    """Return True if the application has waited for a lock for a while, and looks for deadlocks soon."""
    with pg.cursor() as cursor:
        cursor.execute(
            "select 1 from pg_locks join pg_stat_activity using (pid) where not granted"
            " and application_name = 'migration' and clock_timestamp() - waitstart >= '0.2 s'"
        )
        return bool(cursor.fetchall())
