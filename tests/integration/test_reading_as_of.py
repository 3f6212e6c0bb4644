"""lake/time_travel/as_of.py without a JVM, on a real server: what the source showed is what is read back."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.errors import ConfigError, DriftError, LakeError, LakeTableError
from airflow_provider_pgrepl.replication.changelog.maintenance import drop_expired
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import arrow_as_of, arrow_view_as_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.support.landed import Landed
from tests.support.replicated import OWN_COLUMNS

pytestmark = pytest.mark.slow

Rows = Counter[tuple[Any, ...]]

TABLES = ("public.doc", "public.heap", "public.stock")
SCHEMA = """
create table doc (id int primary key, title text, body text);
alter table doc alter body set storage external;
create table heap (a int, b text, c float8);
alter table heap replica identity full;
create table stock (place text, "item.no" int, n numeric(12,2), primary key (place, "item.no"));
"""


def shown(connection: Connection, table: str) -> Rows:
    with connection.cursor() as cursor:
        cursor.execute(f"select * from {table}")
        return Counter(cursor.fetchall())


def read(replicated: Landed, table: str, **moment: Any) -> Rows:
    found = arrow_as_of(replicated.pipeline, table, **moment)
    return rows_of(found)


def rows_of(found: Any) -> Rows:
    own = [name for name in (*OWN_COLUMNS, "_pgrepl_deleted") if name in found.column_names]
    return Counter(zip(*(column.to_pylist() for column in found.drop_columns(own).columns), strict=True))


class Source:
    """Random transactions by one session, and what it saw after each."""

    def __init__(self, connection: Connection, seed: int, tables: tuple[str, ...] = TABLES) -> None:
        self.pg = connection
        self.tables = tables
        self.random = random.Random(seed)
        self.seen: list[tuple[LSN, datetime, dict[str, Rows]]] = []

    def transaction(self) -> None:
        with self.pg.cursor() as cursor:
            cursor.execute("begin")
            for _ in range(self.random.randint(1, 6)):
                cursor.execute("savepoint s")
                try:
                    cursor.execute(self.statement())
                except psycopg2.errors.UniqueViolation:
                    cursor.execute("rollback to s")
            cursor.execute("select clock_timestamp()")
            cursor.execute("commit" if self.random.random() < 0.9 else "rollback")

    def look(self) -> None:
        with self.pg.cursor() as cursor:
            cursor.execute("select pg_current_wal_insert_lsn()::text, clock_timestamp()")
            lsn, now = cursor.fetchone()
        tables = {table: shown(self.pg, table) for table in self.tables}
        self.seen.append((LSN.parse(lsn), now, tables))

    def statement(self) -> str:
        chance, number = self.random.random(), self.random.randint(1, 12)
        other, place = self.random.randint(1, 12), self.random.choice(["'a'", "'b'", "'é\"x'"])
        key = '"item.no"'
        long = "repeat(md5(random()::text), 100)"
        options = {
            "doc": [
                f"insert into doc values ({number}, 't{other}', {long})",
                f"insert into doc values ({number}, null, {long}) on conflict (id) do update set title = 'c'",
                f"update doc set title = 'u{other}' where id <= {number}",
                f"update doc set id = id + {other} where id = {number}",
                f"update doc set body = {long} where id = {number}",
                f"update doc set id = -id where id in ({number}, {other})",
                f"delete from doc where id = {number}",
            ],
            "heap": [
                f"insert into heap select {number % 3}, 'b{other % 2}', 'nan' from generate_series(0, 2)",
                "insert into heap values (null, null, 0), (1, '', -0.0)",
                f"update heap set a = a + 1 where a = {number % 3}",
                f"delete from heap where ctid = (select min(ctid) from heap where a = {number % 3})",
                "update heap set b = null where b = 'b1'",
            ],
            "stock": [
                f"insert into stock values ({place}, {number}, {other}.5) on conflict do nothing",
                f"update stock set n = n * 2 where {key} <= {number}",
                f"update stock set place = 'z', {key} = {key} + 100 where {key} = {number}",
                f"delete from stock where {key} = {number}",
            ],
        }
        table = self.random.choice([name.removeprefix("public.") for name in self.tables])
        if chance < 0.03:
            return f"truncate {table}"
        return self.random.choice(options[table])


def plain(rows: Rows) -> Counter[str]:
    """NaN equals NaN, and 0.0 differs from -0.0."""
    return Counter({repr(row): count for row, count in rows.items()})


@pytest.mark.parametrize("seed", [1, 2])
def test_each_recorded_moment_reads_back_as_the_source_showed_it(
    dsn: str, pg: Connection, tmp_path: Path, seed: int
) -> None:
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, TABLES)
    replicated.begin()
    replicated.apply()
    source = Source(pg, seed)
    for turn in range(4):
        for _ in range(12):
            source.transaction()
            if source.random.random() < 0.2:
                source.look()
        replicated.receive()
        if turn in (0, 2):
            assert [result.error for result in replicated.apply()] == [None] * len(TABLES)
    source.look()
    pg.cursor().execute("insert into doc values (1000)")
    replicated.receive()
    for lsn, now, tables in source.seen:
        by_lsn = arrow_view_as_of(replicated.pipeline, lsn=str(lsn))
        by_time = arrow_view_as_of(replicated.pipeline, timestamp=now)
        for table, rows in tables.items():
            name = f"public.{table.removeprefix('public.')}"
            assert plain(rows_of(by_lsn.table(name))) == plain(rows), (table, lsn)
            assert plain(rows_of(by_time.table(name))) == plain(rows), (table, now)


@pytest.fixture
def landed(dsn: str, pg: Connection, tmp_path: Path) -> Landed:
    """One table, copied empty, one row received and applied, another only received."""
    pg.cursor().execute("create table t (id int primary key, v text)")
    replicated = Landed(dsn, tmp_path, ("public.t",))
    replicated.begin()
    pg.cursor().execute("insert into t values (1, 'a')")
    replicated.receive()
    replicated.apply()
    pg.cursor().execute("insert into t values (2, 'b')")
    replicated.receive()
    return replicated


def ids(replicated: Landed, **moment: Any) -> list[int]:
    return sorted(row[0] for row in read(replicated, "public.t", **moment))


@pytest.mark.thorough("test_each_recorded_moment_reads_back_as_the_source_showed_it")
def test_the_newest_is_read_before_it_is_applied(landed: Landed) -> None:
    assert ids(landed) == [1, 2]
    assert ids(landed, lsn=landed.durable_lsn) == [1, 2]
    assert arrow_view_as_of(landed.pipeline).lsn == landed.durable_lsn - 1


def test_a_table_is_read_as_soon_as_it_was_copied(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute("create table t (id int primary key, v text)")
    replicated = Landed(dsn, tmp_path, ("public.t",))
    place = replicated.begin()
    pg.cursor().execute("insert into t values (1, 'a')")
    replicated.receive()
    assert ids(replicated) == [1]
    assert ids(replicated, lsn=place - 1) == []
    with pytest.raises(LakeError, match=r"can be read from .* on only"):
        ids(replicated, lsn=place - 2)


def test_read_beyond_durable_lsn_is_rejected_and_hint_names_newest_lsn(landed: Landed) -> None:
    with pytest.raises(LakeError, match="has not been received yet") as raised:
        ids(landed, lsn=landed.durable_lsn + 1)
    assert f"lsn='{landed.durable_lsn}'" in raised.value.hint
    with pytest.raises(LakeError, match="may not all be received yet"):
        ids(landed, timestamp=datetime.now(UTC))


def test_a_time_before_the_copy_is_refused(landed: Landed) -> None:
    with pytest.raises(LakeError, match=r"public\.t was copied at|can be read from"):
        ids(landed, timestamp=datetime(2000, 1, 1, tzinfo=UTC))


def test_arguments_that_cannot_be_meant_are_refused(landed: Landed) -> None:
    with pytest.raises(ConfigError, match="says no time zone"):
        ids(landed, timestamp=datetime(2030, 1, 1))  # noqa: DTZ001
    with pytest.raises(ConfigError, match="is not an LSN"):
        ids(landed, lsn="yesterday")
    with pytest.raises(ConfigError, match="are both given"):
        ids(landed, lsn=1, timestamp=datetime.now(UTC))
    with pytest.raises(ConfigError, match="needs the pipeline"):
        arrow_as_of(landed.pipeline.lake_root, "public.t")  # type: ignore[arg-type]
    with pytest.raises(LakeError, match=r"public\.other is not in the lake"):
        read(landed, "public.other")
    with pytest.raises(LakeError, match="schema-qualified"):
        read(landed, "t")
    with pytest.raises(LakeError, match="there is no epoch 2; the newest is 1"):
        ids(landed, epoch=2)


@pytest.mark.thorough("test_reading_across_drift: until when a table can be read after unsafe DDL")
def test_an_altered_table_is_read_up_to_its_change_only(landed: Landed, pg: Connection) -> None:
    before = landed.durable_lsn
    pg.cursor().execute("alter table t rename v to w")
    pg.cursor().execute("insert into t values (3, 'c')")
    landed.receive()
    assert ids(landed, lsn=before) == [1, 2]
    with pytest.raises(DriftError, match=r"column v was renamed to w.*, found at"):
        ids(landed)


def test_a_table_made_anew_under_the_name_is_noticed(landed: Landed, pg: Connection) -> None:
    publication = landed.pipeline.publication
    pg.cursor().execute("drop table t")
    pg.cursor().execute("create table t (id int primary key, v text)")
    pg.cursor().execute(f"alter publication {publication} add table t")
    pg.cursor().execute("insert into t values (7, 'new')")
    landed.receive()
    with pytest.raises(DriftError, match="another was created with its name"):
        ids(landed)


def test_truncate_that_stops_the_table_stops_its_reading(dsn: str, pg: Connection, tmp_path: Path) -> None:
    pg.cursor().execute("create table t (id int primary key, v text)")
    replicated = Landed(dsn, tmp_path, ("public.t",), truncate="error")
    replicated.begin()
    pg.cursor().execute("insert into t values (1, 'a')")
    replicated.receive()
    before = replicated.durable_lsn
    pg.cursor().execute("truncate t")
    replicated.receive()
    assert ids(replicated, lsn=before) == [1]
    with pytest.raises(LakeTableError, match="was truncated at"):
        ids(replicated)


def test_a_table_that_the_nearest_point_does_not_name_is_refused(landed: Landed) -> None:
    points = ConsistentPoints(landed.pipeline.lake_root)
    points.append(ConsistentPoint(1, LSN(landed.durable_lsn - 1), None, {"public.other": 0}))
    with pytest.raises(LakeError, match=r"the lake does not hold public\.t as of"):
        ids(landed)


def test_changes_that_are_not_kept_any_more_are_not_passed_over(landed: Landed) -> None:
    later = datetime.now(UTC) + timedelta(hours=400)
    drop_expired(landed.pipeline.lake_root, 168, {1: int(landed.durable_lsn)}, later)
    with pytest.raises(LakeError, match="are not kept any more"):
        ids(landed)


@pytest.mark.parametrize(
    "policy",
    [{"deletes": "soft"}, {"truncate": "ignore"}, {"deletes": "soft", "truncate": "ignore"}],
    ids=str,
)
@pytest.mark.thorough(
    "the same test, of soft deletes; unit/test_merge: an ignored truncate",
    "{'truncate': 'ignore'}",
    "{'deletes': 'soft', 'truncate': 'ignore'}",
)
def test_policies_read_back_as_the_applier_has_them(
    dsn: str, pg: Connection, tmp_path: Path, policy: dict[str, str]
) -> None:
    keyed = ("public.doc", "public.stock")
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, keyed, **policy)
    replicated.begin()
    replicated.apply()
    source = Source(pg, 5, tables=keyed)
    for turn in range(3):
        for _ in range(15):
            source.transaction()
        if turn:
            pg.cursor().execute("truncate doc")
            source.transaction()
        replicated.receive()
        laid_over = {table: arrow_as_of(replicated.pipeline, table) for table in keyed}
        assert [result.error for result in replicated.apply()] == [None] * len(keyed)
        for table, found in laid_over.items():
            applied = consistent_arrow(replicated.pipeline).table(table)
            assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, applied.to_pylist()))


@pytest.mark.parametrize("policy", [{}, {"deletes": "soft"}], ids=str)
@pytest.mark.thorough(
    "the same test; soft deletes in test_policies_read_back_as_the_applier_has_them", "{'deletes': 'soft'}"
)
def test_history_reads_back_as_the_applier_has_it(
    dsn: str, pg: Connection, tmp_path: Path, policy: dict[str, str]
) -> None:
    keyed = ("public.doc", "public.stock")
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, keyed, history=True, **policy)
    replicated.begin()
    replicated.apply()
    source = Source(pg, 6, tables=keyed)
    for turn in range(2):
        for _ in range(15):
            source.transaction()
        if turn:
            pg.cursor().execute("truncate stock")
        replicated.receive()
        newest = arrow_view_as_of(replicated.pipeline)
        laid_over = {table: newest.history(table) for table in keyed}
        assert [result.error for result in replicated.apply()] == [None] * len(keyed)
        for table, found in laid_over.items():
            for lake in (
                consistent_arrow(replicated.pipeline),
                arrow_view_as_of(replicated.pipeline, lsn=newest.lsn),
            ):
                same = lake.history(table)
                assert sorted(map(repr, found.to_pylist())) == sorted(map(repr, same.to_pylist()))
            assert found.num_rows > 5
    replicated.configure(history=False)
    history = Path(replicated.pipeline.lake_root) / "public/doc~history"
    next(history.glob("_delta_log/*.json")).write_text("{")
    with pytest.raises(LakeError, match="doc~history cannot be opened: ") as caught:
        arrow_view_as_of(replicated.pipeline).history("public.doc")
    assert "resnapshot" not in caught.value.hint
    shutil.rmtree(history)
    with pytest.raises(LakeError, match="keeps no history"):
        arrow_view_as_of(replicated.pipeline).history("public.doc")
