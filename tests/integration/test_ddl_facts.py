"""Facts of PostgreSQL on which drift rests: what DDL announces, and what it changes in the catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.pgoutput.messages import RelationMessage, parse_relation
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect

Run = Callable[..., Any]


@pytest.fixture
def source(dsn: str, run: Run) -> Iterator[Connection]:
    run(
        "create type mood as enum ('sad', 'ok')",
        "create table t (id int primary key, v text, n numeric(5,2), m mood, w varchar(5))",
        "create table u (id int primary key)",
        "insert into t values (1, 'a', 1.5, 'sad', 'x')",
        "create publication p for table t",
        "select pg_create_logical_replication_slot('ddl_' || current_database(), 'pgoutput')",
    )
    connection = connect(dsn, "test")
    yield connection
    connection.close()


def table(source: Connection, name: str = "t", publication: str = "p") -> Relation:
    found = find_relation(source, TableName("public", name), publication)
    assert found is not None
    return found


def announced(run: Run, *between: str) -> list[RelationMessage]:
    """Return the Relation messages that a stream sends if a row is written before and after statements."""
    run("update t set id = id", *between, "update t set id = id")
    messages = run(
        "select data from pg_logical_slot_get_binary_changes('ddl_' || current_database(), null, null,"
        " 'proto_version', '1', 'publication_names', 'p')"
    )
    return [parse_relation(bytes(data)) for (data,) in messages if bytes(data)[:1] == b"R"]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "statements",
    [
        pytest.param(["analyze t"], id="ANALYZE"),
        pytest.param(["alter table t drop v", "alter table t add v text"], id="a column again"),
        pytest.param(["alter table t alter v type text using upper(v)"], id="other values"),
        pytest.param(["alter table t alter v set not null"], id="NOT NULL"),
        pytest.param(["vacuum full t"], id="VACUUM FULL"),
        pytest.param(["create index on t (n)"], id="an index"),
    ],
)
def test_a_relation_is_announced_again_with_the_same_words(run: Run, statements: list[str]) -> None:
    found = announced(run, *statements)
    assert len(found) == 2
    assert {(c.name, c.type_oid, c.typmod) for c in found[0].columns} == {
        (c.name, c.type_oid, c.typmod) for c in found[1].columns
    }


def test_a_table_that_joins_makes_older_servers_announce_the_others_again(
    source: Connection, run: Run
) -> None:
    found = announced(run, "alter publication p add table u")
    assert len(found) == (1 if source.server_version >= 180000 else 2)
    assert len({relation.oid for relation in found}) == 1
    assert found[0] == found[-1]


@pytest.mark.usefixtures("source")
@pytest.mark.parametrize(
    "statement",
    [
        "alter table t rename v to x",
        "alter table t rename to x; create view t as select * from x",
        "alter table t replica identity full",
        "alter table t alter w type varchar(7)",
        "alter table t add x int",
        "alter table t drop v",
    ],
)
def test_a_relation_is_announced_again_with_other_words(run: Run, statement: str) -> None:
    first, *_, last = announced(run, statement)
    assert asdict(first) != asdict(last)


def test_a_label_that_is_renamed_is_not_announced(source: Connection, run: Run) -> None:
    before = table(source)
    assert len(announced(run, "alter type mood rename value 'sad' to 'low'")) == 1
    after = table(source)
    assert changed(before, after) == set()
    assert before != after


def changed(before: Relation, after: Relation) -> set[str]:
    """Return the columns whose `xmin` changed, and "the file" if `relfilenode` did: marks of a rewrite."""

    def xmins(columns: tuple[Column, ...]) -> dict[int, int]:
        return {column.attnum: column.xmin for column in columns}

    now = xmins(after.columns)
    moved = {
        column.name for column in before.columns if column.attnum in now and now[column.attnum] != column.xmin
    }
    return moved | ({"the file"} if before.relfilenode != after.relfilenode else set())


@pytest.mark.parametrize(
    ("statements", "expected"),
    [
        pytest.param(["alter table t alter v type text using upper(v)"], {"the file", "v"}, id="USING"),
        pytest.param(["alter table t alter id type bigint"], {"the file", "id"}, id="wider, rewritten"),
        pytest.param(["alter table t alter w type text"], {"w"}, id="wider, not rewritten"),
        pytest.param(["alter table t alter n type numeric(7,2)"], {"n"}, id="more digits, not rewritten"),
        pytest.param(["vacuum full t"], {"the file"}, id="VACUUM FULL"),
        pytest.param(["cluster t using t_pkey"], {"the file"}, id="CLUSTER"),
        pytest.param(["truncate t"], {"the file"}, id="TRUNCATE"),
        pytest.param(["analyze t"], set(), id="ANALYZE"),
        pytest.param(["alter table t alter v set not null"], {"v"}, id="NOT NULL"),
        pytest.param(["alter table t alter v set default 'x'"], {"v"}, id="a default"),
        pytest.param(["alter table t add x int default 7"], set(), id="a column with a constant"),
        pytest.param(
            ["alter table t add x float8 default random()"], {"the file"}, id="a column with values"
        ),
        pytest.param(["alter table t set unlogged", "alter table t set logged"], {"the file"}, id="UNLOGGED"),
    ],
)
def test_the_catalog_tells_rewrites_from_other_changes(
    source: Connection, run: Run, statements: list[str], expected: set[str]
) -> None:
    if statements[0].endswith("unlogged"):
        run("drop publication p")
    before = table(source)
    run(*statements)
    assert changed(before, table(source)) == expected


def test_a_vacuum_clears_the_missing_value_and_moves_the_column(source: Connection, run: Run) -> None:
    run("alter table t add x int default 7")
    before = table(source)
    assert before.columns[-1].missing == "7"
    run("vacuum full t")
    after = table(source)
    assert after.columns[-1].missing is None
    assert changed(before, after) == {"the file", "x"}


PUBLICATIONS = {
    "tables": "for table t",
    "all tables": "for all tables",
    "a schema": "for tables in schema public",
}


def marks(source: Connection) -> tuple[int, int, int, int]:
    found = table(source, publication="q")
    return found.publication_oid, found.publication_xmin, found.membership_oid, found.membership_xmin


@pytest.mark.parametrize("what", PUBLICATIONS)
def test_other_tables_that_come_and_go_move_neither_publication_nor_membership(
    source: Connection, run: Run, what: str
) -> None:
    run(f"create publication q {PUBLICATIONS[what]}")
    before = marks(source)
    assert all(before)
    ddl = ["create table x (id int primary key)"]
    if what == "tables":
        ddl += ["alter publication q add table u", "alter publication q set table t, x"]
        ddl += ["alter publication q drop table x"]
    run(*ddl)
    assert marks(source) == before


@pytest.mark.parametrize("what", PUBLICATIONS)
def test_publish_option_change_updates_only_publication_catalog_row(
    source: Connection, run: Run, what: str
) -> None:
    run(f"create publication q {PUBLICATIONS[what]}")
    before = marks(source)
    run("alter publication q set (publish = 'insert')")
    after = marks(source)
    assert after[1] != before[1]
    assert (after[0], after[2]) == (before[0], before[2])
    assert (after[3] == before[3]) == (what != "all tables"), "of all tables there is no membership but it"


@pytest.mark.parametrize("what", ["where (id > 5)", "(id, v)"])
def test_a_filter_or_a_list_of_columns_moves_the_membership_alone(
    source: Connection, run: Run, what: str
) -> None:
    run("create publication q for table t")
    before = marks(source)
    run(f"alter publication q set table t {what}")
    after = marks(source)
    assert after[:2] == before[:2]
    assert after[3] != before[3]
