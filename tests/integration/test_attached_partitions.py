"""Partitions that may have held rows when they were attached, which the stream does not announce."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation, read_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect

Run = Callable[..., Any]

LIKE = "create table p (like root including all)"
ATTACH = "alter table root attach partition p for values from (0) to (100)"
ROW = "insert into p values (1, 'x')"
LATER = "insert into root values (2, 'y')"
BRANCH = "create table branch (id int primary key, v text) partition by range (id)"
GRAFT = "alter table root attach partition branch for values from (0) to (100)"
TWIG = "create table p partition of branch for values from (0) to (50)"


BARE = "create table p (id int, n int)"
BARE_ROW = "insert into p values (1, 1)"
BARE_ATTACH = "alter table bare attach partition p for values from (0) to (100)"


ROOT = "create table root (id int primary key, v text) partition by range (id)"


@pytest.fixture
def source(dsn: str, run: Run) -> Iterator[Connection]:
    run(ROOT)
    connection = connect(dsn, "test")
    yield connection
    connection.close()


def had_rows(source: Connection, table: str = "root") -> dict[str, bool]:
    oid = source_oid(source, table)
    found = read_relation(source, oid, None, had_rows=True)
    assert found is not None
    return {part.table.name: part.had_rows for part in found.partitions}


def source_oid(source: Connection, table: str) -> int:
    found = find_relation(source, TableName("public", table))
    assert found is not None
    assert not any(part.had_rows for part in found.partitions), "said only when asked for"
    return found.oid


def at_once(*statements: str) -> list[str]:
    return ["begin", *statements, "commit"]


EMPTY = {
    "made as one": ["create table p partition of root for values from (0) to (100)", LATER],
    "made as one with a default": [
        "create table p partition of root (v default 'x', check (id < 1000)) for values from (0) to (100)",
        LATER,
    ],
    "made and filled as one": at_once("create table p partition of root for values from (0) to (100)", LATER),
    "attached empty": [LIKE, ATTACH],
    "attached empty and filled later": [LIKE, ATTACH, LATER],
    "attached empty with what was there deleted": [LIKE, ROW, "delete from p", ATTACH, LATER],
    "attached empty and filled at once": [LIKE, *at_once(ATTACH, LATER)],
    "made and attached at once": [*at_once(LIKE, ATTACH), LATER],
    "made, attached and filled at once": at_once(LIKE, ATTACH, LATER),
    "made, attached and filled at once in parts": at_once(LIKE, ATTACH, "savepoint s", LATER, "release s"),
    "made below a part": [
        "create table branch partition of root for values from (0) to (100) partition by range (id)",
        TWIG,
        LATER,
    ],
    "made below an attached one": [BRANCH, GRAFT, TWIG, LATER],
    "all made below an attached one at once": at_once(BRANCH, GRAFT, TWIG, LATER),
    "attached below, empty": [BRANCH, TWIG, GRAFT, LATER],
    "attached below, all at once": [*at_once(BRANCH, TWIG, GRAFT), LATER],
    "rows moved into it": [
        "create table q partition of root for values from (100) to (200)",
        "insert into root values (150, 'moved')",
        *at_once(LIKE, ATTACH, "update root set id = 50 where id = 150"),
    ],
}
FILLED = {
    "attached with rows": [LIKE, ROW, ATTACH],
    "attached with rows and renamed at once": [
        "create table other (like root including all)",
        "insert into other values (1)",
        *at_once("alter table other rename to p", ATTACH),
    ],
    "filled and attached at once": [LIKE, *at_once(ROW, ATTACH), LATER],
    "made, filled and attached at once": [*at_once(LIKE, ROW, ATTACH), LATER],
    "made without anything, filled and attached at once": at_once(
        "create table p (id int not null, v text)", ROW, ATTACH
    ),
    "made, filled in parts and attached at once": at_once(LIKE, "savepoint s", ROW, "release s", ATTACH),
    "made in parts, filled and attached at once": at_once("savepoint s", LIKE, "release s", ROW, ATTACH),
    "filled by another while an older transaction was to attach it": [
        "create table other (id int)",
        LIKE,
        "begin",
        "insert into other values (1)",
        "-- another",
        ATTACH,
        "commit",
    ],
    "attached below, with rows": [BRANCH, TWIG, ROW, GRAFT],
    "attached below, with rows, all at once": at_once(BRANCH, TWIG, ROW, GRAFT),
    "attached below, after it was attached itself": [
        BRANCH,
        LIKE,
        ROW,
        "alter table branch attach partition p for values from (0) to (50)",
        GRAFT,
    ],
    "rows moved into it before": [
        BRANCH,
        TWIG,
        "create table q partition of branch for values from (50) to (100)",
        "insert into branch values (60, 'moved')",
        "update branch set id = 10 where id = 60",
        GRAFT,
    ],
    "attached with too many rows to look at": [
        LIKE,
        "alter table p set (fillfactor = 10)",
        ATTACH,
        "insert into root select g, repeat('x', 1000) from generate_series(0, 99) g",
    ],
}


def carry_out(run: Run, dsn: str, statements: list[str]) -> None:
    for statement in statements:
        if statement == "-- another":
            with psycopg2.connect(dsn) as other, other.cursor() as cursor:
                cursor.execute(ROW)
            other.close()
        else:
            run(statement)


def said(source: Connection, run: Run, dsn: str, cases: dict[str, list[str]]) -> dict[str, bool]:
    """Return for each case True if `p` may have held rows; each case starts with an empty `root` alone."""
    found = {}
    for case, statements in cases.items():
        run("drop schema public cascade", "create schema public", ROOT)
        carry_out(run, dsn, statements)
        found[case] = had_rows(source)["p"]
    return found


def test_a_partition_that_was_empty_is_known_to_have_been(source: Connection, run: Run, dsn: str) -> None:
    assert said(source, run, dsn, EMPTY) == dict.fromkeys(EMPTY, False)


def test_a_partition_that_may_have_held_rows_is_said_to(source: Connection, run: Run, dsn: str) -> None:
    assert said(source, run, dsn, FILLED) == dict.fromkeys(FILLED, True)


@pytest.mark.parametrize(
    ("statements", "had"),
    [
        ([BARE, BARE_ROW, BARE_ATTACH], True),
        (["create table p as select 1 as id, 1 as n", BARE_ATTACH], True),
        ([BARE, BARE_ATTACH], False),
        ([BARE, BARE_ATTACH, "insert into bare values (1, 1)"], False),
        (["create table p partition of bare for values from (0) to (100)"], False),
    ],
)
def test_a_table_made_of_nothing_but_columns_takes_as_few_commands_as_a_partition(
    source: Connection, run: Run, statements: list[str], *, had: bool
) -> None:
    run("create table bare (id int, n int) partition by range (id)", *at_once(*statements))
    assert had_rows(source, "bare")["p"] is had


def test_a_partition_made_with_defaults_need_not_be_looked_into(source: Connection, run: Run) -> None:
    many = "insert into bare select g % 100, g from generate_series(1, 20000) g"
    run(
        "create table bare (id int, n int default 3, check (n > 0)) partition by range (id)",
        "create table p partition of bare for values from (0) to (100)",
        many,
    )
    assert had_rows(source, "bare")["p"] is False


def test_locked_or_unreadable_partition_is_assumed_to_have_had_rows(
    source: Connection, run: Run, dsn: str
) -> None:
    run(LIKE, ATTACH)
    assert had_rows(source)["p"] is False
    run("begin", "lock table p in access exclusive mode")
    assert had_rows(source)["p"] is True
    run("rollback", "create role reader login", "grant usage on schema public to reader")
    source.cursor().execute("set role reader")
    try:
        assert had_rows(source)["p"] is True
    finally:
        source.cursor().execute("reset role")
        run("drop owned by reader", "drop role reader")
