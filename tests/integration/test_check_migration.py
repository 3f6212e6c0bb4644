"""check_migration: a migration judged on a copy of the database, which it leaves as it was."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import BusyError, ConfigError, PgReplError, TableError
from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.conftest import closing_connection
from tests.support.recorded import Recorded
from tests.support.replicated import wait_until

SECRET = "canary-0Pen-sesame"
PIPELINE = Pipeline(name="shop", lake="/nowhere", tables=("public.*",), lock_timeout_s=0.2)
_EVERYTHING = """
select array_agg(t order by t) from (
    select c.oid::text || c.relname || c.relfilenode || c.xmin as t from pg_class c
    union all select oid::text || proname || xmin from pg_proc where oid > 16383
    union all select rolname || oid from pg_roles
    union all select attrelid::text || attname || xmin from pg_attribute where attrelid > 16383
    union all select 'row ' || a::text || xmin from public.a
) x
"""


@pytest.fixture
def copy(dsn, run):
    run(
        "create table a (id int primary key, x int, note varchar(10))",
        "create table b (id int primary key, x int)",
        "create table keyless (x int)",
        "insert into a values (1, 5, 'n')",
        "create procedure committing() language plpgsql as"
        " $$begin insert into public.a values (99); commit; end$$",
    )
    return dsn


@pytest.fixture
def left_alone(copy, run):
    """Check that the test left the database as it was."""
    before = run(_EVERYTHING)
    yield
    assert run(_EVERYTHING) == before


def check(copy, sql, **options):
    return check_migration(copy, PIPELINE, sql, **options)


def kinds(report):
    return {table.table: table.kind for table in report.tables}


JUDGED = [
    ("", {}),
    ("create index on a (x); insert into a values (2); analyze a", {}),
    ("alter table a rename column x to y", {"public.a": "unsafe"}),
    (
        "alter table a alter x type text;\nalter table b drop column x, add x int",
        {"public.a", "public.b"},
    ),
    ("drop table a", {"public.a": "unsafe"}),
    (
        "drop table a; create table a (id int primary key, x int, note varchar(10))",
        {"public.a": "unsafe"},
    ),
    ("alter table a rename to z", {"public.a": "unsafe"}),
    ("update a set x = 7; alter table b drop constraint b_pkey", {"public.b": "unsafe"}),
    ("-- made by a tool\nBEGIN;\n\ndrop table a;\n\nCOMMIT;\n\n", {"public.a": "unsafe"}),
    ("create schema other; set search_path to other; create table a (z int)", {}),
    ("create role pgrepl_nobody; set role pgrepl_nobody", {}),
    ("create role pgrepl_nobody; set session authorization pgrepl_nobody", {}),
]
HINTS = [
    (
        "alter table a alter x type text",
        "resnapshot it: pgrepl snapshot FILE.json --tables",
    ),
    ("drop table a", "remove the table: pgrepl remove FILE.json"),
    ("alter table a rename to z", "pgrepl snapshot FILE.json --add 'public.z'"),
]
REFUSED = [
    "drop table b; commit; drop table a",
    "rollback; drop table b",
    "begin; drop table b; commit; begin; drop table a; commit;",
    "drop table b; commit and chain; drop table a; commit",
    "begin; drop table a; rollback;",
    "savepoint s; drop table a; release savepoint s",
    "drop table b; prepare transaction 'x'",
    "drop table b; end; drop table a",
    "do $$begin drop table b; commit; end$$",
    "do $$begin execute 'drop table b'; execute 'commit'; end$$",
    "call committing()",
    "select 1; call committing()",
    "create function f() returns void language plpgsql as $$begin call public.committing(); end$$;"
    " select f()",
    "create function f() returns void language plpgsql as $$begin drop table public.b; commit; end$$;"
    " select f()",
    "create index concurrently i on a (x)",
    "drop table b; vacuum a",
    "alter system set work_mem = '1MB'",
    "create database pgrepl_left",
    "discard all",
]


def test_each_table_is_judged_and_nothing_is_left_behind(copy, run):
    before = run(_EVERYTHING)
    for sql, found in JUDGED:
        report = check(copy, sql)
        assert report.checked == 2, sql
        assert kinds(report).keys() == set(found), sql
        if isinstance(found, dict):
            assert kinds(report) == found, sql
        assert not any(table.marked_errored for table in report.tables), sql
        assert run(_EVERYTHING) == before, sql


def test_the_hint_is_for_a_migration_that_nobody_has_run_yet(copy):
    for sql, hint in HINTS:
        [table] = check(copy, sql).tables
        assert table.hint.startswith(
            "change the migration into one that the lake follows, or run it and then"
        )
        assert hint in table.hint
        assert "set it back" not in table.hint
        assert "retry" not in table.hint


def test_hint_for_a_migration_that_swaps_names_resnapshots_both(copy):
    swap = "alter table a rename to z; alter table b rename to a; alter table z rename to b"
    tables = {table.table: table.hint for table in check(copy, swap).tables}
    assert tables.keys() == {"public.a", "public.b"}
    assert "pgrepl snapshot FILE.json --tables 'public.a,public.b'" in tables["public.a"]
    assert not any("pgrepl remove" in hint for hint in tables.values())


def test_table_that_replaces_another_by_its_name_is_no_swap(copy):
    replaced = "alter table a rename to z; alter table b rename to a"
    hints = {table.table: table.hint for table in check(copy, replaced).tables}
    assert hints.keys() == {"public.a", "public.b"}
    assert "--add 'public.z'" in hints["public.a"]
    assert "--tables 'public.a,public.b'" not in "".join(hints.values())
    assert "pgrepl remove" in hints["public.b"]


def test_table_that_becomes_unlogged_is_to_be_removed_first(copy, run):
    [table] = check(copy, "alter table a set unlogged").tables
    assert table.hint.startswith("PostgreSQL refuses this while the table is published: before it, remove")
    run("create publication pgrepl_shop for table a")
    with pytest.raises(ConfigError, match="because it is part of a publication") as caught:
        check(copy, "alter table a set unlogged")
    assert "remove the table first: pgrepl remove" in caught.value.hint


def test_migration_with_commit_or_irreversible_statement_fails_without_changes(copy, run):
    before = run(_EVERYTHING)
    for sql in REFUSED:
        with pytest.raises(ConfigError, match="the migration fails") as caught:
            check(copy, sql)
        assert caught.value.hint, sql
        assert run(_EVERYTHING) == before, sql


def test_errors_name_the_line_and_no_value(copy, left_alone):
    with pytest.raises(ConfigError, match=r'at line 3, column 8: column "nope" does not exist'):
        check(copy, "-- one\nbegin;\nselect nope from a;\ncommit;")
    for sql in (
        f"select 1;\nselect '{SECRET}' '{SECRET}'",
        f"insert into b values (2, '{SECRET}')",
        f"insert into a values (1, 2, '{SECRET}')",
        f"copy a from stdin;\n{SECRET}\t1\n\\.",
        f"do $$begin raise exception '{SECRET}'; end$$",
    ):
        with pytest.raises(ConfigError) as caught:
            check(copy, sql)
        assert SECRET not in repr(caught.value)
        assert caught.value.__cause__ is None


RAISED = [
    f"raise exception 'x %', '{SECRET}' using errcode = 'CU001'",
    f"raise exception 'x %', '{SECRET}' using errcode = '42P01', hint = '{SECRET}'",
    f"raise exception 'x %', '{SECRET}' using errcode = '57014'",
    f"raise exception 'x %', '{SECRET}' using errcode = '55P03', hint = '{SECRET}'",
    f"raise exception 'x %', '{SECRET}' using errcode = '58030', hint = '{SECRET}'",
    f"execute format('select %I from public.a', '{SECRET}')",
    f"execute format('select 1 from public.%I', '{SECRET}')",
]


def test_error_of_a_function_or_trigger_is_named_by_its_code_alone(copy, run):
    """The error's text is what the function made of the row, under any SQLSTATE."""
    run(
        "create function check_row() returns trigger language plpgsql as $$begin return new; end$$",
        "create trigger check_row before update on a for each row execute function check_row()",
    )
    for statement in RAISED:
        run(
            "create or replace function check_row() returns trigger language plpgsql as"
            f" $$begin {statement}; return new; end$$"
        )
        for sql in ("update a set x = 7", f"do $$begin {statement}; end$$"):
            with pytest.raises(PgReplError, match="SQLSTATE") as caught:
                check(copy, sql)
            assert SECRET not in repr(caught.value), statement
            assert SECRET not in caught.value.hint


def test_commands_of_psql_are_called_so(copy, left_alone):
    with pytest.raises(ConfigError, match="line 2, column 1") as caught:
        check(copy, "drop table b;\n\\connect other")
    assert "psql" in caught.value.hint


def test_a_migration_that_takes_too_long_is_ended_even_if_it_lifts_the_limit(copy, left_alone):
    with pytest.raises(ConfigError, match="statement timeout") as caught:
        check(copy, "set statement_timeout = 0; select pg_sleep(60)", timeout_s=0.2)
    assert "more time" in caught.value.hint


def test_a_lock_that_others_hold_is_not_waited_for_long(copy, left_alone, dsn):
    with psycopg2.connect(dsn) as other:
        other.cursor().execute("lock table a in access share mode")
        with pytest.raises(BusyError, match="lock timeout"):
            check(copy, "drop table a")
    other.close()


def test_statements_go_first_while_a_lock_is_waited_for(copy, left_alone, dsn):
    """They wait behind the lock that is waited for, so that it is asked for shortly."""
    pipeline = replace(PIPELINE, lock_timeout_s=60)
    with (
        closing_connection(dsn) as report,
        closing_connection(dsn) as application,
        ThreadPoolExecutor(1) as pool,
    ):
        report.cursor().execute("begin; lock table a in access share mode")
        checking = pool.submit(check_migration, copy, pipeline, "drop table a")
        wait_until(lambda: _is_waited_for(application, "a"))
        application.cursor().execute("set lock_timeout = '10s'; select from a")
        assert not checking.done()
        report.cursor().execute("rollback")
        assert kinds(checking.result()) == {"public.a": "unsafe"}


def _is_waited_for(connection, table):
    with connection.cursor() as cursor:
        cursor.execute("select 1 from pg_locks where not granted and relation = %s::regclass", (table,))
        return bool(cursor.fetchall())


def test_a_publication_that_is_there_is_looked_at_too(copy, run):
    Recorded(copy)
    assert kinds(check(copy, "alter publication pgrepl_shop drop table a")) == {"public.a": "unsafe"}
    report = check(copy, "drop publication pgrepl_shop")
    assert report.is_unsafe
    assert "no longer exists" in report.to_text()


def test_a_copy_that_lacks_tables_of_the_pipeline_is_refused(copy):
    pipeline = Pipeline(name="shop", lake="/nowhere", tables=("public.missing",))
    with pytest.raises(TableError, match=r"public\.missing"):
        check_migration(copy, pipeline, "")


def test_new_tables_under_a_pattern_are_listed_and_renamed_ones_are_not(copy):
    report = check(copy, "create table fresh (id int primary key); alter table a rename to z")
    assert report.new_tables == ("public.fresh",)
    assert kinds(report) == {"public.a": "unsafe"}


def test_safe_changes_are_called_so(copy):
    assert kinds(check(copy, "alter table a add extra text")) == {"public.a": "safe"}


def test_generated_columns_of_a_copy_without_the_publication_have_not_drifted(copy, run):
    run("alter table a add double int generated always as (x * 2) stored")
    assert kinds(check(copy, "create index on a (x)")) == {}


@pytest.mark.parametrize(
    ("sql", "kind"),
    [
        ("create table p2 partition of p for values from (10) to (20)", None),
        (
            "create table p3 (id int primary key);"
            " alter table p attach partition p3 for values from (20) to (30)",
            None,
        ),
        ("alter table p attach partition stock for values from (30) to (40)", "unsafe"),
    ],
)
def test_a_table_that_was_there_may_hold_rows_when_it_is_attached(copy, run, sql, kind):
    run(
        "create table p (id int primary key) partition by range (id)",
        "create table p1 partition of p for values from (0) to (10)",
        "create schema store; create table store.stock (id int primary key)",
    )
    assert kinds(check(copy, "")) == {}
    found = kinds(check(copy, sql.replace("stock", "store.stock"))).get("public.p")
    assert found == kind if kind else found != "unsafe"
