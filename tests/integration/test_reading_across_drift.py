"""lake/reading across safe and unsafe DDL, on a real server.

Each LSN has the columns that the table had then, and the rows that the source showed.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from airflow_provider_pgrepl.errors import DriftError
from airflow_provider_pgrepl.replication.changelog.relation_index import (
    EffectiveFrom,
    RelationIndex,
    relations_uri,
)
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_as_of, arrow_view_as_of, verified
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.connection import Connection
from airflow_provider_pgrepl.replication.source.event_trigger import trigger as event_trigger
from tests.support.landed import Landed
from tests.support.received import wait_until_seen
from tests.support.replicated import OWN_COLUMNS

pytestmark = pytest.mark.slow

PointInTime = tuple[LSN, list[str], Counter[tuple[Any, ...]]]

T = "public.t"
CREATE = "create table t (id int primary key, v varchar(9), n int)"
SAFE = (
    "insert into t values (1, 'a', 10), (2, 'b', 20), (3, 'c', 30)",
    "alter table t alter n type bigint",
    "insert into t values (4, 'd', 1::bigint << 40)",
    "alter table t add w int default 7, alter v type text",
    "update t set v = 'a longer text' where id = 1",
    "begin; update t set w = 8 where id = 2; delete from t where id = 3;"
    " alter table t add z text default 'z'; insert into t values (5, 'e', 50, 5, null);"
    " update t set v = 'y' where id = 4; commit",
    "alter table t drop n",
    "insert into t values (6, 'f', 6, 'zz')",
    "update t set w = w + 1 where id in (1, 5)",
    "alter table t add k bigint",
    "update t set k = 1 where id = 6; delete from t where id = 2",
)


class Watched:
    """Runs statements and remembers what the table was after each that wrote rows.

    The receiver keeps up: it sees the catalog as each statement left it.
    """

    def __init__(self, landed: Landed, connection: Connection) -> None:
        self.landed = landed
        self.pg = connection
        self.seen: list[PointInTime] = []

    def run(self, *statements: str) -> None:
        with self.landed.receiving() as receiver:
            for statement in statements:
                self.pg.cursor().execute(statement)
                if not statement.startswith("alter"):
                    self.look()
                    wait_until_seen(receiver, self.landed.source_lsn())

    def look(self) -> None:
        with self.pg.cursor() as cursor:
            cursor.execute("select pg_current_wal_insert_lsn()::text")
            (lsn,) = cursor.fetchone() or ("",)
            cursor.execute("select * from t")
            names = [column.name for column in cursor.description or ()]
            self.seen.append((LSN.parse(lsn), names, Counter(cursor.fetchall())))


def rows_of(found: pa.Table, names: list[str]) -> Counter[tuple[Any, ...]]:
    if "_pgrepl_deleted" in found.column_names:
        found = found.filter(pc.invert(found["_pgrepl_deleted"]))
    return Counter(zip(*(found[name].to_pylist() for name in names), strict=True))


def shapes(watched: Watched) -> Iterator[tuple[LSN, list[str], Counter[tuple[Any, ...]], list[str]]]:
    """Yield each LSN, the source's columns and rows then, and the lake's columns: dropped ones stay."""
    held: list[str] = []
    for lsn, names, rows in watched.seen:
        held = [name for name in ("id", "v", "n", "w", "z", "k") if name in {*held, *names}]
        yield lsn, names, rows, held


def assert_each_moment_shows_the_source(landed: Landed, watched: Watched) -> None:
    for lsn, names, rows, held in shapes(watched):
        found = arrow_as_of(landed.pipeline, T, lsn=lsn)
        own = [name for name in found.column_names if name.startswith("_pgrepl")]
        assert found.column_names == [*held, *own], lsn
        assert rows_of(found, names) == rows, lsn


@pytest.mark.parametrize(
    ("identity", "policy"),
    [("default", {}), ("full", {}), ("default", {"deletes": "soft"})],
    ids=["keyed", "keyless", "soft"],
)
@pytest.mark.thorough("the same test, keyed; soft deletes in test_reading_as_of", "soft", "keyless")
def test_each_moment_across_safe_ddl_shows_what_the_source_was_then(
    dsn: str, pg: Connection, tmp_path: Path, identity: str, policy: dict[str, str]
) -> None:
    create = CREATE if identity == "default" else CREATE.replace(" primary key", "")
    pg.cursor().execute(f"{create}; alter table t replica identity {identity}")
    landed = Landed(dsn, tmp_path, (T,), **policy)
    landed.begin()
    landed.apply()
    watched = Watched(landed, pg)
    for some in (SAFE[:5], SAFE[5:]):
        watched.run(*some)
        assert_each_moment_shows_the_source(landed, watched)
        newest = arrow_as_of(landed.pipeline, T)
        assert [result.error for result in landed.apply()] == [None]
        applied = consistent_arrow(landed.pipeline).table(T).select(newest.column_names)
        assert sorted(map(repr, newest.to_pylist())) == sorted(map(repr, applied.to_pylist()))
        assert newest.schema.equals(applied.schema)
    assert_each_moment_shows_the_source(landed, watched)


@pytest.mark.thorough("test_each_moment_across_safe_ddl_shows_what_the_source_was_then")
def test_a_point_has_the_columns_of_its_time(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,))
    landed.begin()
    watched = Watched(landed, pg)
    points = []
    for some in (SAFE[:1], SAFE[1:5], SAFE[5:]):
        watched.run(*some)
        assert [result.error for result in landed.apply()] == [None]
        points.append(consistent_arrow(landed.pipeline).point.lsn)
    tables = [consistent_arrow(landed.pipeline, lsn).table(T) for lsn in points]
    names = ["".join(sorted({*table.column_names} - {*OWN_COLUMNS, "id"})) for table in tables]
    assert names == ["nv", "nvw", "knvwz"]


@pytest.mark.thorough("test_each_moment_across_safe_ddl_shows_what_the_source_was_then")
def test_the_relation_of_a_moment_is_the_one_effective_then(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,))
    landed.begin()
    watched = Watched(landed, pg)
    watched.run(*SAFE)
    for lsn, names, _ in watched.seen:
        relation = arrow_view_as_of(landed.pipeline, lsn=lsn).relation(T)
        assert [column.name for column in relation.columns] == names


@pytest.mark.thorough(
    "test_each_moment_across_safe_ddl_shows_what_the_source_was_then; history in test_reading_as_of"
)
def test_history_reads_back_across_ddl_as_the_applier_has_it(
    dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,), history=True)
    landed.begin()
    landed.apply()
    watched = Watched(landed, pg)
    for some in (SAFE[:5], SAFE[5:]):
        watched.run(*some)
        newest = arrow_view_as_of(landed.pipeline)
        found = newest.history(T)
        assert [result.error for result in landed.apply()] == [None]
        for lake in (consistent_arrow(landed.pipeline), arrow_view_as_of(landed.pipeline, lsn=newest.lsn)):
            same = lake.history(T)
            assert set(same.column_names) == set(found.column_names)
            same = same.select(found.column_names)
            assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, same.to_pylist()))
    assert found.filter(pc.is_valid(found["_pgrepl_to_lsn"])).num_rows > 5


def test_after_unsafe_ddl_it_says_until_when_the_table_can_be_read(
    dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,))
    landed.begin()
    watched = Watched(landed, pg)
    watched.run(*SAFE[:5])
    pg.cursor().execute("alter table t rename v to renamed")
    pg.cursor().execute("insert into t values (9, 'i', 90, 9)")
    landed.receive()
    with pytest.raises(DriftError, match=r"renamed.*found at") as raised:
        arrow_as_of(landed.pipeline, T)
    until = LSN.parse(raised.value.message.rpartition(" ")[2])
    assert rows_of(arrow_as_of(landed.pipeline, T, lsn=until - 1), watched.seen[-1][1]) == watched.seen[-1][2]
    assert_each_moment_shows_the_source(landed, watched)
    assert all(verified(landed.pipeline, T, lsn=lsn) for lsn, _, _ in watched.seen)


UNSEEN = {
    "another column": ("alter table t drop v", "alter table t add v varchar(9)"),
    "other values": ("alter table t alter v type varchar(9) using upper(v)",),
}


@pytest.mark.parametrize("ddl", UNSEEN.values(), ids=UNSEEN.keys())
@pytest.mark.thorough("the same test, of another column", "other values")
def test_rows_before_untraced_ddl_are_read_as_unverified(
    dsn: str, pg: Connection, tmp_path: Path, ddl: tuple[str, ...]
) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,))
    copied = LSN(landed.begin() - 1)
    watched = Watched(landed, pg)
    watched.run("insert into t values (1, 'a', 10)", "insert into t values (2, 'b', 20)")
    (announced,) = {row["commit_lsn"] for row in landed.changelog_rows("R")}
    before = watched.seen[-1][0]
    assert verified(landed.pipeline, T, lsn=before)
    pg.cursor().execute("; ".join(ddl))
    watched.look()
    between = watched.seen[-1][0]
    watched.run("insert into t values (3, 10, 'c')" if len(ddl) > 1 else "insert into t values (3, 'c', 10)")
    found = max(row["commit_lsn"] for row in landed.changelog_rows("R"))
    assert between < found
    for lsn in (before, between):
        assert not verified(landed.pipeline, T, lsn=lsn)
        with pytest.warns(
            UnverifiedWarning, match=rf"public\.t was altered between {LSN(announced)}"
        ) as told:
            arrow_as_of(landed.pipeline, T, lsn=lsn)
        assert str(LSN(found)) in str(told[0].message)
        unverified = arrow_view_as_of(landed.pipeline, lsn=lsn).planner.plan(TableName.parse(T)).unverified
        assert unverified is not None
        assert (unverified.above, unverified.found) == (announced, found)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arrow_as_of(landed.pipeline, T, lsn=copied)
    with pytest.raises(DriftError, match="found at"):
        verified(landed.pipeline, T)


@pytest.mark.thorough("test_rows_before_untraced_ddl_are_read_as_unverified")
def test_a_moment_after_which_the_catalog_was_seen_is_verified(
    dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,))
    landed.begin()
    watched = Watched(landed, pg)
    watched.run("insert into t values (1, 'a', 10)")
    pg.cursor().execute("analyze t")
    watched.run("insert into t values (2, 'b', 20)")
    pg.cursor().execute("alter table t drop v; alter table t add v varchar(9)")
    watched.run("insert into t values (3, 30, 'c')")
    assert [verified(landed.pipeline, T, lsn=lsn) for lsn, _, _ in watched.seen[:2]] == [True, False]


def test_an_event_trigger_gives_ddl_its_place(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute(CREATE)
    landed = Landed(dsn, tmp_path, (T,), event_trigger=True)
    with landed.source() as source:
        event_trigger.install(source, landed.pipeline)
        trigger = event_trigger.read_watching(source, landed.pipeline)
    assert trigger is not None
    copied = EffectiveFrom(landed.begin() - 1, trigger)
    index = RelationIndex(relations_uri(landed.pipeline.lake_root))
    index.add(Epoch(1), RelationRecord.of_catalog(landed.relations[0]), copied)
    watched = Watched(landed, pg)
    watched.run("insert into t values (1, 'a', 10)", "insert into t values (2, 'b', 20)")
    pg.cursor().execute("begin; alter table t drop v; alter table t add v varchar(9); commit")
    watched.run("insert into t values (3, 30, 'c')")
    assert [verified(landed.pipeline, T, lsn=lsn) for lsn, _, _ in watched.seen[:2]] == [True, True]
    with pytest.raises(DriftError, match="found at"):
        verified(landed.pipeline, T)
