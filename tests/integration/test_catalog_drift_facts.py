"""Facts of the catalog by which drift is judged: values of older rows, labels, files of partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect

Run = Callable[..., Any]


@pytest.fixture
def source(dsn: str) -> Iterator[Connection]:
    connection = connect(dsn, "test")
    yield connection
    connection.close()


def table(source: Connection, name: str = "t") -> Relation:
    found = find_relation(source, TableName("public", name))
    assert found is not None
    assert Relation.from_json(found.to_json()) == found
    return found


def missing(relation: Relation) -> dict[str, str | None]:
    return {column.name: column.missing for column in relation.columns if column.missing is not None}


def test_the_value_of_older_rows_is_told_as_the_stream_would_send_it(source: Connection, run: Run) -> None:
    run(
        "create type mood as enum ('sad', 'it''s \"ok\"')",
        "create domain d as numeric(5,2)",
        "create table t (id int primary key)",
        "insert into t values (1)",
        """alter table t
            add i int default 7, add none int, add empty text default '', add word text default 'NULL',
            add odd text default E'a "b", \\\\c {d}\\n', add b box default '(1,2),(0,0)',
            add a text[] default '{a,"b c",NULL}', add m mood default 'it''s "ok"', add dom d default 1.5,
            add ts timestamptz default '2020-01-01 12:00+05', add iv interval default '1 day 2 hours',
            add f float8 default 0.1, add bytes bytea default '\\x00ff', add r int4range default '[1,5)',
            add j jsonb default '{"k": [1, 2]}', add bit bit(3) default '101',
            add u text default upper('x')""",
    )
    found = table(source)
    with source.cursor() as cursor:
        names = [column.name for column in found.columns]
        cursor.execute(f"select {', '.join(f'{name}::text' for name in names)} from public.t")
        (row,) = cursor.fetchall()
    expected = {name: value for name, value in zip(names, row, strict=True) if value is not None}
    del expected["id"]
    assert missing(found) == expected
    assert len(expected) == 16
    run("vacuum full t")
    assert missing(table(source)) == {}


def test_a_default_that_changes_from_row_to_row_leaves_no_value_but_another_file(
    source: Connection, run: Run
) -> None:
    run("create table t (id int primary key)", "insert into t values (1)")
    before = table(source)
    run("alter table t add c float8 default random()")
    after = table(source)
    assert missing(after) == {}
    assert after.relfilenode != before.relfilenode
    assert (before.natts, after.natts) == (1, 2)
    run("alter table t drop c")
    assert table(source).natts == 2


def test_a_row_type_is_not_waited_for_and_counts_as_rewritten(source: Connection, run: Run, dsn: str) -> None:
    run(
        "create type pair as (x int, y int)",
        "create table t (id int primary key)",
        "alter table t add p pair[] default '{\"(1,2)\"}', add q int default 1",
    )
    run("begin", "alter type pair add attribute z int")
    source.cursor().execute("set lock_timeout = '100ms'")
    found = table(source)
    run("rollback")
    assert found.relfilenode < 0
    assert missing(found) == {"q": "1"}


def test_labels_of_an_enum_are_in_their_order_and_keep_their_oids(source: Connection, run: Run) -> None:
    run("create type mood as enum ('a', 'c')", "create table t (id int primary key, m mood[])")

    def labels() -> tuple[tuple[int, str], ...]:
        pg_type = table(source).columns[1].type
        assert pg_type is not None
        return pg_type.only_part.labels

    before = labels()
    run("alter type mood add value 'b' before 'c'", "alter type mood rename value 'a' to 'z'")
    after = labels()
    assert [label for _, label in after] == ["z", "b", "c"]
    assert (after[0][0], after[2]) == (before[0][0], before[1])


PARTITIONED = (
    "create table t (id int primary key, v text) partition by range (id)",
    "create table a partition of t for values from (0) to (10)",
    "create table sub partition of t for values from (10) to (30) partition by range (id)",
    "create table b partition of sub for values from (10) to (20)",
    "insert into t values (1), (11)",
)


def test_a_partitioned_table_has_its_leaves_files_and_an_ordinary_one_none(
    source: Connection, run: Run
) -> None:
    run(*PARTITIONED, "create table plain (id int primary key)", "create table child () inherits (plain)")
    parts = table(source).partitions
    assert [str(part.table) for part in parts] == ["public.a", "public.b"]
    assert [part.relfilenode for part in parts] == [
        run(f"select pg_relation_filenode('{name}')")[0][0] for name in "ab"
    ]
    assert table(source, "plain").partitions == ()


@pytest.mark.parametrize(
    ("ddl", "expected"),
    [
        pytest.param(["alter table t add c int default 7"], "7", id="added"),
        pytest.param(["alter table t add c int"], None, id="added without a default"),
        pytest.param(
            [
                "alter table t add c int default 7",
                "create table z partition of sub for values from (20) to (30)",
            ],
            "7",
            id="a leaf made afterwards has none",
        ),
        pytest.param(["alter table t add c int default 7", "vacuum full a"], "7", id="a leaf rewritten"),
        pytest.param(
            ["alter table t add c int default 7", "grant select (c) on t to public"],
            "7",
            id="only the root touched",
        ),
        pytest.param(
            ["alter table t add c int default 7", "alter table a alter c set statistics 5"],
            "7",
            id="one leaf touched",
        ),
        pytest.param(
            [
                "alter table t add c int",
                "create table z (id int primary key, v text)",
                "alter table z add c int default 8",
                "alter table sub attach partition z for values from (20) to (30)",
            ],
            None,
            id="a leaf brought one with it",
        ),
        pytest.param(
            [
                "alter table t add c int default 7",
                "create table z (id int primary key, v text)",
                "alter table z add c int default 8",
                "alter table sub attach partition z for values from (20) to (30)",
            ],
            "7",
            id="a leaf brought another with it",
        ),
        pytest.param(
            [
                "create table z (id int primary key, v text)",
                "alter table z add c int default 8",
                "begin",
                "alter table t add c int default 7",
                "alter table sub attach partition z for values from (20) to (30)",
                "commit",
            ],
            "7",
            id="a leaf brought another with it, all at once",
        ),
        pytest.param(
            ["begin", "truncate a, b", "alter table t add c int default 7", "commit"],
            "7",
            id="beside a truncate",
        ),
    ],
)
def test_the_leaves_of_a_partitioned_table_tell_what_older_rows_have(
    source: Connection, run: Run, ddl: list[str], expected: str | None
) -> None:
    run(*PARTITIONED, *ddl)
    found = table(source)
    assert found.columns[2].missing == expected
    assert all(part.relfilenode > 0 for part in found.partitions)


def test_leaves_that_do_not_agree_count_as_rewritten(source: Connection, run: Run) -> None:
    run(
        *PARTITIONED,
        "create table half (id int primary key, v text) partition by range (id)",
        "create table z partition of half for values from (30) to (40)",
        "alter table half add c int default 8",
        "alter table t add c int default 7",
        "grant select (c) on t to public",
        "alter table t attach partition half for values from (30) to (50)",
    )
    found = table(source)
    assert found.columns[2].missing is None
    assert len(found.partitions) == 3
    assert all(part.relfilenode < 0 for part in found.partitions)
