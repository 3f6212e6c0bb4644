"""app/creek/deployment.py: the publication and the functions in the schema _creek are made where there are
none."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import psycopg2
import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.app.creek.deployment import Deployment, SourceTables
from tests.conftest import closing_connection
from tests.integration.test_ddl_amid_copy import HANGS_S
from tests.support.replicated import execute, wait_until

THEIRS = (
    "create function _creek.{} (pub text, _tbl regclass) returns void language sql as 'select 1 -- theirs'"
)
BOTH = ("add_table", "remove_table")


def prepare(dsn: str, listed: str = "public.t", **variables: str) -> None:
    environment = {
        **variables,
        "PG_URI": dsn,
        "PG_PUBLICATION_NAME": "creek_pub",
        "PG_PUBLICATION_SLOT": "creek_slot",
        "NATS_URI": "nats://127.0.0.1:1",
        "PGREPL_LAKE": "/lake",
        "PG_TABLES": listed,
    }
    with closing(SourceTables(Deployment.of(environment))) as tables:
        tables.prepare()


def theirs(dsn: str) -> set[str]:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select proname::text from pg_proc where prosrc like '%theirs'")
        return {name for (name,) in cursor.fetchall()}


@pytest.mark.parametrize("kept", [(), ("add_table",), BOTH])
def test_functions_of_others_stay_and_are_named(dsn, caplog, kept) -> None:
    execute(dsn, "create table t (id int primary key)", "create table more (id int primary key)")
    execute(dsn, "create schema _creek", *map(THEIRS.format, kept))
    for _ in range(2):
        prepare(dsn)
        assert theirs(dsn) == set(kept)
    assert [name for name in BOTH if f"the function _creek.{name} was not made by" in caplog.text] == list(
        kept
    )
    execute(dsn, *(f"drop function _creek.{name}" for name in kept), "select 1")
    prepare(dsn)
    execute(dsn, "select _creek.add_table('creek_pub', 'more')")
    execute(dsn, "select _creek.remove_table('creek_pub', 'more')")


KEYLESS = {
    "keyless": ("create table keyless (id int)",),
    "virtual": (
        "create table virtual (id int primary key, g int generated always as (id + 1) virtual)",
        "alter table virtual replica identity full",
    ),
    "child": ("create table parent (id int primary key)", "create table child () inherits (parent)"),
    "part": (
        "create table root (id int) partition by range (id)",
        "create table part partition of root for values from (0) to (10)",
    ),
}
"""Statements that create a table whose changes the source refuses once it, or the one above, is published."""
EARLIER = """
BEGIN
    -- Between two of its writers: else whether changes of who has begun to write it are sent is left to\
 chance.
    EXECUTE pg_catalog.format('LOCK TABLE %s IN SHARE ROW EXCLUSIVE MODE', _tbl);
    EXECUTE pg_catalog.format('ALTER PUBLICATION %I ADD TABLE %s', pub, _tbl);
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('ADD ', _tbl));
END
"""
"""The body of `add_table` in earlier versions."""
EARLIER_REMOVE = """
BEGIN
    EXECUTE pg_catalog.format('ALTER PUBLICATION %I DROP TABLE %s', pub, _tbl);
    PERFORM pg_catalog.pg_notify('creek', pg_catalog.concat('REMOVE ', _tbl));
END
"""
MADE = "create function _creek.{} (pub text, _tbl regclass) returns void language plpgsql {} as $${}$$"
ABOVE = {"child": "parent", "part": "root"}


@pytest.mark.differs_by_major("virtual generated columns are there from 18 on", since=(18,))
@pytest.mark.parametrize("refused", KEYLESS)
def test_tables_whose_changes_the_source_would_refuse_are_not_published(dsn, pg, refused) -> None:
    if refused == "virtual" and pg.info.server_version < 180000:
        return  # it has no such thing
    execute(dsn, "create table t (id int primary key)", *KEYLESS[refused])
    with pytest.raises(TableError, match=f"public.{refused}: while it is published, the source refuses"):
        prepare(dsn, f"public.t, public.{ABOVE.get(refused, refused)}")
    with pg.cursor() as cursor:
        cursor.execute("select from pg_publication")
        assert cursor.rowcount == 0


def test_table_of_inserts_is_published_without_identity(dsn) -> None:
    execute(dsn, "create table keyless (id int)")
    prepare(dsn, "public.keyless", PGREPL_PIPELINE_OPTIONS='{"insert_only": ["public.keyless"]}')


def test_table_with_a_stored_generated_column_in_its_identity_is_published(dsn) -> None:
    execute(
        dsn,
        "create table t (id int primary key, g int generated always as (id + 1) stored)",
        "alter table t replica identity full",
    )
    prepare(dsn)
    execute(dsn, "insert into t values (1)", "update t set id = 2")


@pytest.mark.parametrize(
    ("name", "more", "body", "is_kept"),
    [
        ("add_table", "", EARLIER, False),
        ("add_table", "", EARLIER.replace("ADD ", "ADDED "), True),
        ("add_table", "security definer", EARLIER, True),
        ("remove_table", "", EARLIER_REMOVE, False),
    ],
)
def test_function_of_an_earlier_version_is_replaced_unless_it_was_changed(
    dsn, pg, caplog, name, more, body, is_kept
) -> None:
    made = MADE.format(name, more, body)
    execute(dsn, "create table t (id int primary key)", "create schema _creek", made)
    prepare(dsn)
    with pg.cursor() as cursor:
        cursor.execute("select prosrc = %s from pg_proc where proname = %s", (body, name))
        assert cursor.fetchone() == (is_kept,)
    assert (f"the function _creek.{name} was not made by" in caplog.text) == is_kept


@pytest.fixture
def functions(dsn: str) -> None:
    """The functions, and a publication of table `t`; also a table `more`, which has a row."""
    execute(dsn, "create table t (id int primary key)", "create table more (id int primary key, n int)")
    execute(dsn, "insert into t values (1)", "insert into more values (1)")
    prepare(dsn)


@contextmanager
def transaction(dsn: str, *statements: str) -> Iterator[psycopg2.extensions.cursor]:
    """A transaction that has run statements, and is rolled back."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("; ".join(("begin", *statements)))
        yield cursor


ADD = "select _creek.add_table('creek_pub', '{}')"
REMOVE = "select _creek.remove_table('creek_pub', '{}')"


@pytest.mark.differs_by_major("virtual generated columns are there from 18 on", since=(18,))
@pytest.mark.parametrize("refused", KEYLESS)
def test_added_table_whose_changes_the_source_would_refuse_is_not_published(
    dsn, pg, functions, refused
) -> None:
    if refused == "virtual" and pg.info.server_version < 180000:
        return  # it has no such thing
    execute(dsn, *KEYLESS[refused])
    with pytest.raises(
        psycopg2.errors.ObjectNotInPrerequisiteState, match=f"UPDATE and DELETE on {refused},"
    ):
        execute(dsn, ADD.format(ABOVE.get(refused, refused)))


@pytest.mark.parametrize(
    ("moving", "holding", "later"),
    [
        (ADD, "update more set n = 2", "insert into more values (2)"),
        (REMOVE, "lock table more in share mode", "create index on more (n)"),
    ],
    ids=["add", "remove"],
)
def test_statements_do_not_wait_behind_a_table_that_waits_to_move(
    dsn, pg, functions, moving, holding, later
) -> None:
    if moving is REMOVE:
        execute(dsn, "alter publication creek_pub add table more")
    with ThreadPoolExecutor(1) as pool, transaction(dsn, holding) as earlier:
        waiting = pool.submit(execute, dsn, moving.format("more"))
        wait_until(lambda: waits(pg))
        execute(dsn, f"set lock_timeout = '5s'; {later}")
        assert not waiting.done()
        earlier.execute("commit")
        waiting.result(HANGS_S)


@pytest.mark.parametrize(
    ("second", "holding"),
    [(ADD.format("last"), "update last set id = 2"), (REMOVE.format("t"), "lock table t in share mode")],
    ids=["add", "remove"],
)
def test_transaction_that_moves_several_tables_makes_no_other_one_fail(
    dsn, pg, functions, second, holding
) -> None:
    execute(dsn, "create table last (id int primary key)", "insert into last values (1)")
    with (
        ThreadPoolExecutor(1) as pool,
        transaction(dsn, holding) as application,
        transaction(dsn, ADD.format("more")) as moving,
    ):
        writing = pool.submit(application.execute, "update more set n = 2")
        wait_until(lambda: waits(pg))
        with pytest.raises(psycopg2.errors.LockNotAvailable, match=r"for 00:00:02(.|\n)*Try again"):
            moving.execute(second)
        moving.execute("rollback")
        writing.result(HANGS_S)


def waits(pg) -> bool:
    with pg.cursor() as cursor:
        cursor.execute("select from pg_locks where not granted and relation = 'more'::regclass")
        return cursor.rowcount > 0
