"""Ranges of a copy that has not ended: which of them the server shows to have the same rows later."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect, row
from airflow_provider_pgrepl.replication.source.copy import copy_stream
from airflow_provider_pgrepl.replication.source.copy.copy_stream import (
    CopiedRange,
    CopyRange,
    checked_together,
    open_copy,
    plan_ranges,
    unchanged,
)
from tests.conftest import closing_connection

TABLE = TableName("public", "t")
RANGE_BYTES = 64 << 10
"""Eight pages."""
FIRST, LAST = 1, 4000


class Snapshot:
    """A snapshot of the table: its ranges, with those of an earlier one, and their rows."""

    def __init__(self, dsn: str, copied: Sequence[CopiedRange]) -> None:
        self._dsn = dsn
        self.keeper = connect(dsn, "keeper")
        with self.keeper.cursor() as cursor:
            cursor.execute("begin isolation level repeatable read read only")
            cursor.execute("select pg_export_snapshot()")
            self.name = cursor.fetchone()[0]
        relation = find_relation(self.keeper, TABLE, "p")
        assert relation is not None
        self.ranges = plan_ranges(self.keeper, relation, RANGE_BYTES, copied=copied)
        self.xmin = int(row(self.keeper, "select pg_snapshot_xmin(pg_current_snapshot())::text")[0])

    def rows(self, part: CopyRange) -> list[bytes]:
        with open_copy(self._dsn, self.name, part) as stream:
            return sorted(stream.read().splitlines())

    def copied(self) -> dict[CopiedRange, list[bytes]]:
        rows = [(part, self.rows(part)) for part in self.ranges]
        return {part.as_copied(len(found), self.xmin): found for part, found in rows if part.pages}

    def unchanged(self) -> list[CopiedRange]:
        groups = checked_together(self.ranges, 3)
        found = [part for group in groups for part in unchanged(self._dsn, self.name, group)]
        assert [part for group in groups for part in group] == [one for one in self.ranges if one.copied]
        return [part.copied for part in found if part.copied is not None]


@contextmanager
def snapshot(dsn: str, copied: Sequence[CopiedRange] = ()) -> Iterator[Snapshot]:
    taken = Snapshot(dsn, copied)
    try:
        yield taken
    finally:
        taken.keeper.close()


@pytest.fixture
def table(run):
    run(
        "create table t (id int primary key, v text) with (autovacuum_enabled = off, fillfactor = 80)",
        f"insert into t select g, repeat('v', 100) from generate_series({FIRST}, {LAST}) g",
        "create publication p for table t",
    )


def copied_before(dsn: str) -> dict[CopiedRange, list[bytes]]:
    with snapshot(dsn) as taken:
        copied = taken.copied()
    assert len(copied) > 5
    return copied


def changed(dsn: str, copied: dict[CopiedRange, list[bytes]], published: str = "true") -> list[int]:
    """Return the places of the ranges that are to be copied again, after checking all rows."""
    with snapshot(dsn, list(copied)) as later:
        unchanged = later.unchanged()
        assert {one: later.rows(part) for part in later.ranges if (one := part.copied) in unchanged} == {
            one: copied[one] for one in unchanged
        }
        with closing_connection(dsn) as now, now.cursor() as cursor:
            cursor.execute(f"select count(*) from t where {published}")
            everything = [row for part in later.ranges for row in later.rows(part)]
            assert len(everything) == len(set(everything)) == cursor.fetchone()[0]
    return [
        place for place, one in enumerate(sorted(copied, key=lambda one: one.start)) if one not in unchanged
    ]


STATEMENTS: dict[str, tuple[list[str], list[int] | None]] = {
    "nothing": ([], []),
    "row locks": (["begin", "select * from t for update", "commit"], []),
    "rollback": (["begin", "update t set v = 'x'", "delete from t", "rollback"], []),
    "vacuum freeze": (["vacuum (freeze) t"], []),
    "analyze": (["analyze t"], []),
    "update": ([f"update t set v = 'changed' where id = {FIRST}"], [0]),
    "delete": ([f"delete from t where id = {FIRST}"], [0]),
    "insert at the end": (["insert into t values (0, repeat('v', 100))"], [-1]),
    "insert into room": (
        [f"delete from t where id = {FIRST}", "vacuum t", "insert into t values (0, 'v')"],
        [0],
    ),
    "rewrite": (["vacuum full t"], None),
    "truncate": (["truncate t", f"insert into t select g, 'w' from generate_series(1, {LAST}) g"], None),
}
"""Statements, and the places of the ranges that they change; None for all."""


@pytest.mark.parametrize("name", STATEMENTS)
def test_only_ranges_with_other_rows_are_changed(dsn, run, table, name):
    statements, wanted = STATEMENTS[name]
    copied = copied_before(dsn)
    for statement in statements:
        run(statement)
    everything = list(range(len(copied)))
    assert changed(dsn, copied) == (everything if wanted is None else [everything[place] for place in wanted])


@pytest.mark.parametrize("nested", [False, True])
def test_rows_of_a_transaction_that_had_not_ended_are_a_change(dsn, run, table, nested):
    """One row is replaced, in the same range, by one with an ID that the earlier snapshot may hold as ended.

    The snapshot lists the IDs of transactions that run, and not those of their subtransactions.
    """
    with closing_connection(dsn) as writer:
        writer.autocommit = False
        with writer.cursor() as cursor:
            cursor.execute("select txid_current()")
            if nested:
                cursor.execute("savepoint s")
            cursor.execute(f"update t set v = 'changed' where id = {FIRST}")
        run(
            "insert into t values (-1, 'so that later transaction IDs have ended')",
            "delete from t where id = -1",
        )
        copied = copied_before(dsn)
        writer.commit()
    assert changed(dsn, copied)[0] == 0


def test_ranges_of_a_file_that_has_shrunk_are_not_looked_for(dsn, run, table):
    copied = copied_before(dsn)
    run(f"delete from t where id > {LAST // 2}", "vacuum t")
    assert changed(dsn, copied) == list(range(len(copied) // 2, len(copied)))


def test_gaps_and_the_end_are_cut_and_newer_copies_come_first(dsn, run, table):
    copied = list(copied_before(dsn))
    gap = [one for one in copied if one not in copied[2:5]]
    wide = replace(copied[0], end=copied[3].end, xmin=copied[0].xmin - 1)
    run(f"insert into t select g, repeat('v', 100) from generate_series({LAST + 1}, {LAST * 2}) g")
    with snapshot(dsn, [*gap, wide]) as later:
        assert [part.copied for part in later.ranges if part.copied] == gap
        ends = [(part.start, part.start + part.pages) for part in later.ranges]
        assert [start for start, _ in ends[1:]] == [end for _, end in ends[:-1]]
        assert max(part.pages for part in later.ranges) <= 2 * max(one.end - one.start for one in copied)
        assert sum(len(later.rows(part)) for part in later.ranges) == LAST * 2


def test_a_row_filter_counts_only_rows_that_are_copied(dsn, run, table):
    run("alter publication p set table t where (id % 2 = 0)")
    copied = copied_before(dsn)
    run(f"update t set v = 'not published' where id = {FIRST}")
    assert changed(dsn, copied, "id % 2 = 0") == []
    run(f"update t set v = 'published' where id = {FIRST + 1}")
    assert changed(dsn, copied, "id % 2 = 0") == [0]


def test_ranges_of_another_row_filter_are_not_kept(dsn, run, table):
    copied = copied_before(dsn)
    run("alter publication p set table t where (id > 0)")
    assert changed(dsn, copied, "id > 0") == list(range(len(copied)))


def test_leaves_of_a_partitioned_table_are_kept_apart(dsn, run):
    run(
        "create table t (id int primary key, v text) partition by range (id)",
        "create table t_1 partition of t for values from (0) to (2000)",
        "create table t_2 partition of t for values from (2000) to (4001)",
        f"insert into t select g, repeat('v', 100) from generate_series({FIRST}, {LAST}) g",
        "create publication p for table t with (publish_via_partition_root)",
    )
    copied = copied_before(dsn)
    run("truncate t_1")
    with snapshot(dsn, list(copied)) as later:
        leaf = max(one.leaf_oid for one in copied)
        assert set(later.unchanged()) == {one for one in copied if one.leaf_oid == leaf}


def test_leaf_that_was_altered_while_it_was_detached_is_copied_again(dsn, run):
    """Nothing of the partitioned table shows it, and no row is written."""
    run(
        "create table t (id int primary key, b int, v text) partition by range (id)",
        "create table t_1 partition of t for values from (0) to (4001)",
        f"insert into t select g, 2, repeat('v', 100) from generate_series({FIRST}, {LAST}) g",
        "create publication p for table t with (publish_via_partition_root)",
    )
    copied = copied_before(dsn)
    run(
        "alter table t detach partition t_1",
        "alter table t_1 drop column b",
        "alter table t_1 add column b int default 5",
        "alter table t attach partition t_1 for values from (0) to (4001)",
    )
    assert changed(dsn, copied) == list(range(len(copied)))


def test_ranges_that_take_long_to_check_are_copied(dsn, run, table, monkeypatch):
    copied = copied_before(dsn)
    sizes = sorted({one.end - one.start for one in copied})
    monkeypatch.setattr(copy_stream, "_MOST_CHECKED_BYTES", sizes[-1] * 8192 - 1)
    with snapshot(dsn, list(copied)) as later:
        assert {one.end - one.start for one in later.unchanged()} == set(sizes[:-1])


def test_very_many_ranges_are_planned_at_once():
    """Comparing each with all others would take minutes."""
    many = [CopiedRange(1, 1, start, start + 1, "", 1, 3) for start in range(200_000)]
    random.Random(1).shuffle(many)
    pieces = copy_stream._pieces(200_001, 10, [*many, *many])
    assert [start for start, _, _ in pieces] == list(range(200_001))


@pytest.mark.parametrize("seed", range(1, 7))
def test_no_range_with_other_rows_counts_as_unchanged(dsn, run, table, seed):
    """Random transactions, of which some run while the earlier snapshot is taken."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        writers = [stack.enter_context(closing_connection(dsn)) for _ in range(3)]
        for writer in writers:
            writer.autocommit = False
            work(writer, chance)
        copied = copied_before(dsn)
        for _ in range(chance.randint(1, 12)):
            writer = chance.choice(writers)
            if chance.random() < 0.5:
                chance.choice((writer.commit, writer.rollback))()
            work(writer, chance)
        for writer in writers:
            writer.commit()
    if chance.random() < 0.5:
        run("vacuum t")
    changed(dsn, copied)


def work(writer: Connection, chance: random.Random) -> None:
    """A statement or two, some of which a savepoint holds or takes back. No writer waits for another one."""
    with writer.cursor() as cursor:
        cursor.execute("set lock_timeout = '200ms'")
        for _ in range(chance.randint(1, 2)):
            cursor.execute("savepoint s")
            at = chance.randint(FIRST, LAST)
            try:
                cursor.execute(
                    chance.choice(
                        (
                            f"update t set v = repeat('u', 100) where id = {at}",
                            f"delete from t where id between {at} and {at + 3}",
                            f"insert into t values ({-chance.randint(1, 10**9)}, repeat('i', 100))",
                            f"update t set v = repeat('w', 100) where id between {at} and {at + 30}",
                        )
                    )
                )
            except (psycopg2.errors.LockNotAvailable, psycopg2.errors.DeadlockDetected):
                cursor.execute("rollback to s")
            if chance.random() < 0.2:
                cursor.execute("rollback to s")
