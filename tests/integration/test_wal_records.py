"""pg_walinspect says which tables a transaction did not change, and nothing where it cannot be sure."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_provider_pgrepl.replication.app.operations.losses import skip_transaction
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import connect, rows
from airflow_provider_pgrepl.replication.source.slot import read_slot
from airflow_provider_pgrepl.replication.source.wal_records import untouched_tables
from demo.postgres import Server
from tests.conftest import closing_connection
from tests.support.encoded_database import NOT_UTF8, encoded_database, insert_bytes
from tests.support.kept import Kept
from tests.support.replicated import execute

NAMES = ("t", "u", "v", "parted")


@pytest.fixture
def source(debian_dsn: str) -> Iterator[str]:
    execute(
        debian_dsn,
        "create extension if not exists pg_walinspect",
        "create table t (a int primary key, b text)",
        "create table u (a int primary key, b text)",
        "create table v (a int primary key, b text)",
        "create table parted (a int primary key) partition by range (a)",
        "create table parted_1 partition of parted for values from (0) to (100)",
        "create table parted_2 partition of parted for values from (100) to (200)",
        "insert into u values (1, 'x')",
        "select pg_create_logical_replication_slot('w', 'pgoutput')",
    )
    yield debian_dsn
    execute(debian_dsn, "select pg_drop_replication_slot('w')")


def untouched(dsn: str, *statements: str, after: tuple[str, ...] = (), role: str = "") -> set[str]:
    """The names of those tables that one transaction of these statements is shown not to have changed."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("begin")
        for statement in statements:
            cursor.execute(statement)
        cursor.execute("select pg_current_xact_id()::text::bigint")
        (xid,) = cursor.fetchone()
        cursor.execute("select pg_current_wal_insert_lsn()::text")
        commit = LSN.parse(cursor.fetchone()[0])
        cursor.execute("commit")
    execute(dsn, *after)
    connection = connect(dsn, "test")
    try:
        oids = {oid: name for name, oid in rows(connection, "select relname, oid::bigint from pg_class")}
        wanted = [oid for oid, name in oids.items() if name in NAMES]
        slot = read_slot(connection, "w")
        assert slot is not None
        assert slot.restart_lsn is not None
        if role:
            execute(dsn, f"create role {role}")
            connection.cursor().execute(f"set role {role}")
        found = untouched_tables(connection, wanted, slot.restart_lsn, commit, xid)
    finally:
        connection.close()
    if role:
        execute(dsn, f"drop role {role}")
    return {oids[oid] for oid in found}


def test_tables_that_it_wrote_are_told_from_those_that_others_wrote(source: str) -> None:
    execute(source, "insert into v values (7, 'another transaction')")
    assert untouched(source, "insert into t values (1, 'x')") == {"u", "v", "parted"}


def test_released_savepoint_and_toast_writes_count_but_rolled_back_writes_do_not(source: str) -> None:
    execute(source, "alter table v alter b set storage external")
    found = untouched(
        source,
        "savepoint s",
        "update u set b = 'y'",
        "release savepoint s",
        "savepoint s",
        "insert into t values (1, 'x')",
        "rollback to savepoint s",
        "insert into v values (1, repeat('x', 100000))",
    )
    assert found == {"t", "parted"}


def test_a_partition_is_its_table_also_when_it_left_since(source: str) -> None:
    assert untouched(source, "insert into parted values (150)") == {"t", "u", "v"}
    leaves = ("alter table parted detach partition parted_2",)
    assert untouched(source, "insert into parted values (151)", after=leaves) == {"t", "u", "v"}


@pytest.mark.parametrize(
    "statement", ["truncate t", "alter table t alter b type varchar(10)", "copy t (a) from program 'echo 5'"]
)
def test_other_ways_to_write_are_seen_or_nothing_is_said(source: str, statement: str) -> None:
    execute(source, "insert into t values (1, 'x')")
    assert "t" not in untouched(source, statement)


def test_a_table_that_was_rewritten_since_leaves_nothing_to_say(source: str) -> None:
    assert untouched(source, "insert into t values (1, 'x')", after=("truncate t",)) == set()


def test_a_role_without_the_right_is_told_nothing(source: str) -> None:
    assert untouched(source, "insert into t values (1, 'x')", role="nobody_wal") == set()


def test_without_the_extension_nothing_is_said(source: str) -> None:
    execute(source, "drop extension pg_walinspect")
    assert untouched(source, "insert into t values (1, 'x')") == set()


def test_a_skip_spares_the_tables_that_the_wal_shows_to_be_unchanged(debian: Server, tmp_path) -> None:
    with encoded_database(debian, "SQL_ASCII") as dsn:
        execute(dsn, "create table u(a int primary key, b text)", "create extension pg_walinspect")
        kept = Kept(dsn, tmp_path, ("public.t", "public.u"))
        kept.take("public.t", "public.u")
        insert_bytes(dsn, NOT_UTF8["SQL_ASCII"])
        execute(dsn, "insert into u values (1, 'after')")
        lsn = kept.unsendable()
        skipped = skip_transaction(kept.access, lsn)
        assert (skipped.touched, skipped.seen) == (
            (TableName("public", "t"),),
            (TableName("public", "u"),),
        )
        kept.receive()
        assert kept.bring_forward("public.u").error is None
        kept.assert_equal("public.u")
