"""Columns of exclude_columns: no value of theirs is ever written below the lake's root."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from tests.support.handed import Handed
from tests.support.received import wait_until_seen
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

SECRET = "classified"
T = "public.t"
EXCLUDED = ("public.t.secret",)
CHANGES = (
    "insert into t values (1, 'a', 'classified 1'), (2, 'b', repeat('classified 2 ', 2000)), (3, 'c', null)",
    "update t set v = v || '!' where id < 3",
    "update t set secret = 'classified again' where id = 1",
    "update t set id = 30 where id = 3",
    "begin; insert into t select n, 'many', 'classified ' || n from generate_series(100, 2000) n; commit",
    "delete from t where id in (2, 101)",
)


@pytest.fixture(params=["dsn", pytest.param("debian_dsn", marks=pytest.mark.thorough("on the newest major"))])
def source(request: pytest.FixtureRequest) -> str:
    dsn: str = request.getfixturevalue(request.param)
    return dsn


class Guarded(Handed):
    """One table with a column whose values must not be kept."""

    def __init__(self, dsn: str, folder: Path, **options: Any) -> None:
        options.setdefault("exclude_columns", EXCLUDED)
        super().__init__(dsn, folder, (T,), part_bytes=20_000, **options)

    def take(self) -> Guarded:
        self.relation: Relation = self.copy(T)
        return self

    def follow(self, *statements: str) -> TableResult:
        execute(self.dsn, *statements)
        return self.stream(self.relation)

    def cells(self) -> Iterator[str]:
        """All that is written, file by file, as text."""
        for file in Path(self.pipeline.lake_root).rglob("*"):
            if file.suffix == ".parquet":
                yield str(pq.read_table(file, partitioning=None).to_pydict())
            if file.is_file():
                yield file.read_bytes().decode("latin-1")

    def assert_guarded(self) -> None:
        assert not [text for text in self.cells() if SECRET in text]

    def values(self) -> list[tuple[Any, ...]]:
        rows = self.lake_rows(T)
        assert "secret" not in rows.column_names
        return sorted(zip(rows["id"].to_pylist(), rows["v"].to_pylist(), strict=True))

    def source_values(self) -> list[tuple[Any, ...]]:
        with self.source() as connection, connection.cursor() as cursor:
            cursor.execute("select id, v from public.t order by id")
            return list(cursor.fetchall())


@pytest.mark.parametrize("identity", ["default", "full"])
@pytest.mark.parametrize("kind", ["plain", "partitioned"])
@pytest.mark.thorough(
    "the same test, of each identity with the other kind of table",
    "dsn-plain-default",
    "dsn-partitioned-full",
)
def test_no_value_of_an_excluded_column_is_written(
    source: str, tmp_path: Path, kind: str, identity: str
) -> None:
    execute(
        source,
        "create table t(id int primary key, v text, secret text)"
        + (" partition by range (id)" if kind == "partitioned" else ""),
    )
    if kind == "partitioned":
        execute(source, "create table t_1 partition of t default")
    leaf = "t_1" if kind == "partitioned" else "t"
    execute(
        source,
        f"alter table {leaf} replica identity {identity}",
        f"alter table t replica identity {identity}",
        f"alter table {leaf} alter secret set storage external",
        "insert into t values (50, 'old', 'classified before')",
    )
    guarded = Guarded(source, tmp_path, history=True).take()
    assert guarded.follow(*CHANGES).error is None
    assert guarded.values() == guarded.source_values()
    guarded.assert_guarded()


def test_a_default_of_an_excluded_column_is_not_written(source: str, tmp_path: Path) -> None:
    execute(
        source,
        "create table t(id int primary key, v text)",
        "insert into t values (1, 'a')",
        "alter table t add column secret text default 'classified default'",
    )
    guarded = Guarded(source, tmp_path).take()
    assert (
        guarded.follow("update t set v = 'b'", "alter table t add w int", "update t set v = 'c'").error
        is None
    )
    guarded.assert_guarded()


def test_an_excluded_column_stays_excluded_when_it_is_renamed(source: str, tmp_path: Path) -> None:
    execute(source, "create table t(id int primary key, v text, secret text)")
    guarded = Guarded(source, tmp_path).take()
    with guarded.receiving() as receiver:
        execute(source, "insert into t values (1, 'a', 'classified 1')")
        wait_until_seen(receiver, guarded.source_lsn())
        execute(
            source, "alter table t rename secret to open", "insert into t values (2, 'b', 'classified 2')"
        )
        wait_until_seen(receiver, guarded.source_lsn())
    result = guarded.follow("alter table t add w int", "insert into t values (3, 'c', 'classified 3', 4)")
    assert result.error is None
    assert guarded.values() == [(1, "a"), (2, "b"), (3, "c")]
    assert "open" not in guarded.lake_rows(T).column_names
    guarded.assert_guarded()


def test_a_renamed_table_keeps_hiding_a_column_that_is_dropped_and_added_again(
    source: str, tmp_path: Path
) -> None:
    execute(source, "create table t(id int primary key, v text, secret text)")
    guarded = Guarded(source, tmp_path).take()
    result = guarded.follow(
        "alter table t rename to u",
        "insert into u values (1, 'a', 'classified 1')",
        "alter table u drop column secret",
        "alter table u add column secret text default 'classified default'",
        "insert into u values (2, 'b', 'classified 2')",
    )
    assert result.error is not None
    assert [row["new"] for row in guarded.changelog_rows("I")] == [["1", "a", None], ["2", "b", None]]
    guarded.assert_guarded()


@pytest.mark.thorough(
    "test_an_excluded_column_stays_excluded_when_it_is_renamed; test_hidden_everywhere: another of its name"
)
def test_names_that_are_swapped_swap_no_secrets(source: str, tmp_path: Path) -> None:
    execute(source, "create table t(id int primary key, v text, secret text)")
    guarded = Guarded(source, tmp_path).take()
    result = guarded.follow(
        "insert into t values (1, 'a', 'classified 1')",
        "begin; alter table t rename secret to x; alter table t rename v to secret;"
        " alter table t rename x to v; commit",
        "insert into t values (2, 'classified 2', 'c'), (3, 'b', 'classified 3')",
    )
    assert result.error is not None
    texts = [text for text in guarded.cells() if "classified 3" in text or "classified 1" in text]
    assert not texts, "what the column with attnum 3 holds"


@pytest.mark.thorough("test_hidden_everywhere: no byte of an excluded column is kept")
def test_ddl_that_the_receiver_sees_late_lets_no_secret_through(source: str, tmp_path: Path) -> None:
    execute(source, "create table t(id int primary key, v text, secret text, n int)")
    guarded = Guarded(source, tmp_path).take()
    result = guarded.follow(
        "insert into t values (1, 'a', 'classified 1', 1)",
        "alter table t rename secret to other",
        "insert into t values (2, 'b', 'classified 2', 1)",
        "alter table t add w text default 'w'",
        "insert into t values (3, 'c', 'classified 3', 1)",
        "alter table t drop column n",
        "insert into t values (4, 'd', 'classified 4')",
    )
    guarded.assert_guarded()
    assert result.error is not None or guarded.values() == guarded.source_values()


def test_column_excluded_from_changelog_but_present_in_lake_stops_table(source: str, tmp_path: Path) -> None:
    """The pipeline file excludes a column that the table was copied with: never null in silence."""
    execute(source, "create table t(id int primary key, v text, secret text)")
    guarded = Guarded(source, tmp_path, exclude_columns=()).take()
    copied = guarded.pipeline
    guarded.configure(exclude_columns=EXCLUDED)
    execute(source, "insert into t values (1, 'a', 'classified')")
    guarded.receive()
    guarded.pipeline = copied
    result = guarded.stream(guarded.relation)
    assert result.error is not None
    assert "column secret is not kept" in result.error
    assert "--tables" in result.hint


def test_a_relation_says_which_columns_are_not_kept(source: str, tmp_path: Path) -> None:
    execute(source, "create table t(id int primary key, v text, secret text)")
    guarded = Guarded(source, tmp_path).take()
    guarded.follow("insert into t values (1, 'a', 'x')")
    (row,) = guarded.changelog_rows("R")
    assert RelationRecord.from_json(row["new"][0]).hidden == (2,)
    assert [change["new"] for change in guarded.changelog_rows("I")] == [["1", "a", None]]
