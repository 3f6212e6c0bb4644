"""lake/as_of.py without a JVM, on a real server: what the source showed is what is read back."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from pathlib import Path
from typing import Any

import psycopg2.extensions
import pytest

from airflow_provider_pgrepl.replication.lake.as_of import arrow_as_of, arrow_view_as_of
from airflow_provider_pgrepl.replication.lsn import LSN
from tests.support.landed import Landed
from tests.support.replicated import OWN_COLUMNS

Connection = psycopg2.extensions.connection
Rows = Counter[tuple[Any, ...]]

TABLES = ("public.doc", "public.heap", "public.stock")
SCHEMA = """
create table doc (id int primary key, title text, body text);
alter table doc alter body set storage external;
create table heap (a int, b text, c float8);
alter table heap replica identity full;
create table stock (place text, item int, n numeric(12,2), primary key (place, item));
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

    def __init__(self, connection: Connection, seed: int) -> None:
        self.pg = connection
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
        tables = {table: shown(self.pg, table) for table in TABLES}
        self.seen.append((LSN.parse(lsn), now, tables))

    def statement(self) -> str:
        chance, number = self.random.random(), self.random.randint(1, 12)
        other, place = self.random.randint(1, 12), self.random.choice(["'a'", "'b'", "'é\"x'"])
        long = "repeat(md5(random()::text), 100)"
        choices = {
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
                f"update stock set n = n * 2 where item <= {number}",
                f"update stock set place = 'z', item = item + 100 where item = {number}",
                f"delete from stock where item = {number}",
            ],
        }
        table = self.random.choice([name.removeprefix("public.") for name in TABLES])
        if chance < 0.03:
            return f"truncate {table}"
        return self.random.choice(choices[table])


def plain(rows: Rows) -> Counter[str]:
    """NaN equals NaN, and 0.0 differs from -0.0."""
    return Counter({repr(row): count for row, count in rows.items()})


@pytest.mark.parametrize("seed", range(2))
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
