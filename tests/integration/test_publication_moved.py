"""A publication that is altered, also back to what it was: tables stop that may have missed changes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.drift.judge import MADE_AGAIN
from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source import publication
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.publication import drop_tables
from tests.support.landed import Landed
from tests.support.received import EAGER, wait_until_seen
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow

RESNAPSHOT = "resnapshot it"
MAKE = "create table s.{}(id int primary key, v text)"


@pytest.fixture
def source(dsn: str) -> str:
    """A database with two tables."""
    execute(dsn, "create schema s", "create schema elsewhere", MAKE.format("t"), MAKE.format("u"))
    return dsn


class Watched(Landed):
    """Tables, copied empty and then filled by the stream."""

    def __init__(
        self, dsn: str, folder: Path, kind: str = "", tables: Iterable[str] = ("t", "u"), **options: Any
    ) -> None:
        self.kind = kind
        self.names = list(tables)
        if kind:
            options |= {"publication_mode": "use", "publication": "theirs"}
        options.setdefault("flush_interval_s", 0.05)
        super().__init__(dsn, folder, tuple(f"s.{name}" for name in self.names), **options)

    def start(self) -> Watched:
        if self.kind:
            execute(self.dsn, f"create publication theirs for {self.kind}")
        self.begin()
        fill = "insert into s.{} select n, 'x' from generate_series(1, 20) n"
        execute(self.dsn, *(fill.format(name) for name in self.names))
        self.receive()
        assert [result.error for result in self.apply()] == [None] * len(self.names)
        return self

    def execute(self, *statements: str) -> None:
        name = self.pipeline.publication
        execute(self.dsn, *(text.replace("PUB", name) for text in statements))

    def results(self) -> dict[str, TableResult]:
        return {
            relation.table.name: result for relation, result in zip(self.relations, self.apply(), strict=True)
        }

    def result(self, table: str) -> TableResult:
        return self.results()[table]

    def announced(self) -> int:
        return len(self.publication_statuses())


# Changes of each table that are undone again, and the table's error; all other tables are left alone.
Move = tuple[list[str], list[str], str]
ALL = "all tables with (publish_via_partition_root = true)"
FEWER_KINDS: Move = (
    ["alter publication PUB set (publish = 'insert, update')", "delete from s.t"],
    ["alter publication PUB set (publish = 'insert, update, delete, truncate')"],
    "the publication was altered",
)
MOVES: dict[str, tuple[str, dict[str, Move]]] = {
    "fewer kinds, and back": ("", {"t": FEWER_KINDS}),
    "members": (
        "",
        {
            "left_out_and_put_back": (
                [
                    "alter publication PUB drop table s.left_out_and_put_back",
                    "delete from s.left_out_and_put_back",
                ],
                ["alter publication PUB add table s.left_out_and_put_back"],
                "removed from the publication and added again",
            ),
            "left_out": (
                ["alter publication PUB drop table s.left_out", "delete from s.left_out"],
                [],
                "the table was taken out of the publication",
            ),
            "made_again_and_put_back": (
                ["drop table s.made_again_and_put_back", MAKE.format("made_again_and_put_back")],
                ["alter publication PUB add table s.made_again_and_put_back"],
                MADE_AGAIN,
            ),
        },
    ),
    "all tables": (
        ALL,
        {
            "made_again": (
                ["drop table s.made_again"],
                [MAKE.format("made_again")],
                MADE_AGAIN,
            ),
            "dropped": (["drop table s.dropped"], [], "the table was dropped"),
        },
    ),
}
MOVES_SINCE_15: dict[str, tuple[str, dict[str, Move]]] = {
    "row filter, and back": (
        "",
        {
            "t": (
                ["alter publication PUB set table s.t where (id > 10), s.u", "delete from s.t"],
                ["alter publication PUB set table s.t, s.u"],
                "the publication",
            )
        },
    ),
    "moved out of a published schema, and back": (
        "tables in schema s with (publish_via_partition_root = true)",
        {
            "t": (
                ["alter table s.t set schema elsewhere", "delete from elsewhere.t"],
                ["alter table elsewhere.t set schema s"],
                "in the publication",
            )
        },
    ),
}


def assert_moves_stop_their_tables(
    dsn: str, folder: Path, kind: str, moves: dict[str, Move], *, running: bool
) -> None:
    execute(dsn, *(MAKE.format(name) for name in moves if name != "t"))
    watched = Watched(dsn, folder, kind, [*moves, "u"]).start()
    if running:
        with watched.receiving() as receiver:
            wait_until_seen(receiver, watched.source_lsn())
            for away, back, _ in moves.values():
                watched.execute("begin; " + "; ".join([*away, *back]) + "; commit")
            wait_until_seen(receiver, watched.source_lsn())
    else:
        for away, back, _ in moves.values():
            watched.execute(*away, *back)
        watched.receive()
    results = watched.results()
    for table, (_, _, reason) in moves.items():
        result = results[table]
        assert result.error is not None, table
        assert reason in result.error, table
        assert RESNAPSHOT in result.hint, table
    assert (results["u"].error is not None) == (FEWER_KINDS in moves.values())


def test_tables_that_change_places_both_stop_though_one_is_not_written(source, tmp_path):
    watched = Watched(source, tmp_path).start()
    swap = ("alter table s.t rename to x", "alter table s.u rename to t", "alter table s.x rename to u")
    watched.execute("; ".join(swap), "insert into s.t values (100, 'that was u')")
    watched.receive()
    results = watched.results()
    for name, other in (("t", "u"), ("u", "t")):
        says = f"the table was renamed or moved to s.{other}, and another one has its name"
        assert says in (results[name].error or "")
        both = f"resnapshot both: pgrepl snapshot FILE.json --tables 's.{name},s.{other}'"
        assert (
            f"if the pipeline has s.{other}, exchange s.{name} and s.{other} in every" in results[name].hint
        )
        assert both in results[name].hint


def test_a_table_that_is_renamed_and_back_between_two_looks_goes_on(source, tmp_path):
    watched = Watched(source, tmp_path).start()
    watched.execute(
        "alter table s.t rename to x; alter table s.x rename to t", "insert into s.t values (100, 'x')"
    )
    watched.receive()
    assert [result.error for result in watched.results().values()] == [None, None]


@pytest.mark.differs_by_major(
    "since 15 publications have schemas, row filters and column lists, held in more catalogs than before",
    since=(15,),
)
@pytest.mark.parametrize("running", [False, True], ids=["away", "running"])
@pytest.mark.parametrize(("kind", "moves"), MOVES.values(), ids=MOVES)
@pytest.mark.thorough(
    "the same test, of members altered while away, and of fewer kinds while it runs",
    "members-running",
    "all tables-away",
    "all tables-running",
    "fewer kinds, and back-away",
)
def test_a_table_whose_publication_was_altered_stops(
    source: str, tmp_path: Path, kind: str, moves: dict[str, Move], *, running: bool
) -> None:
    assert_moves_stop_their_tables(source, tmp_path, kind, moves, running=running)


@pytest.mark.parametrize("running", [False, True], ids=["away", "running"])
@pytest.mark.parametrize(("kind", "moves"), MOVES_SINCE_15.values(), ids=MOVES_SINCE_15)
@pytest.mark.thorough(
    "the same test, of a row filter; a schema in the test of a table that was copied since",
    "row filter, and back-away",
    "moved out of a published schema, and back-running",
    "moved out of a published schema, and back-away",
)
def test_a_table_stops_whose_row_filter_or_schema_was_altered(
    source: str, tmp_path: Path, kind: str, moves: dict[str, Move], *, running: bool
) -> None:
    assert_moves_stop_their_tables(source, tmp_path, kind, moves, running=running)


@pytest.mark.thorough("test_a_table_whose_publication_was_altered_stops, of members")
def test_a_partition_that_was_no_partition_for_a_while_stops(source: str, tmp_path: Path) -> None:
    """It is published through the table that it is a part of, and was not when it was detached."""
    attach = "alter table s.root attach partition s.t for values from (0) to (1000)"
    execute(source, "create table s.root(id int primary key, v text) partition by range (id)", attach)
    watched = Watched(source, tmp_path, "table s.root, s.u").start()
    watched.execute("alter table s.root detach partition s.t", "delete from s.t", attach)
    watched.receive()
    assert watched.result("t").error is not None
    assert watched.result("u").error is None


def test_a_table_that_is_taken_out_while_others_are_written_stops_with_the_first_change_after(
    source: str, tmp_path: Path
) -> None:
    watched = Watched(source, tmp_path).start()
    with watched.receiving() as receiver:
        wait_until_seen(receiver, watched.source_lsn())
        watched.execute(
            "alter publication PUB drop table s.t", "delete from s.t", "delete from s.u where id = 1"
        )
        target = watched.source_lsn()
        wait_until(lambda: receiver.progress.durable_lsn >= target - 8 or receiver.request_keepalive())
        durable = watched.durable_lsn
    # No consistent point may name the table at or above the change that came after.
    assert watched.result("t").error_lsn < durable
    assert watched.result("u").error is None


def test_unrelated_ddl_and_publication_maintenance_do_not_stop_tables(source: str, tmp_path: Path) -> None:
    watched = Watched(source, tmp_path).start()
    execute(source, "create table s.w(id int primary key)", "insert into s.w values (1)")
    with watched.receiving() as receiver:
        with watched.source() as connection:
            found = find_relation(connection, TableName("s", "w"))
            assert found is not None
            publication.add_tables(source, watched.pipeline.publication, [found], 5)
            wait_until_seen(receiver, watched.source_lsn())
            drop_tables(connection, watched.pipeline.publication, [found.table], 5)
        watched.execute(
            *(f"vacuum freeze {name}" for name in ("pg_publication", "pg_publication_rel", "pg_depend")),
            *(f"vacuum full {name}" for name in ("pg_publication", "pg_publication_rel")),
            "comment on publication PUB is 'ours'",
            "analyze s.t",
            "grant select on s.t to public",
            "create index on s.t(v)",
            "alter table s.t set (fillfactor = 90)",
            "delete from s.t where id = 1",
        )
        wait_until_seen(receiver, watched.source_lsn())
    watched.receive()
    results = watched.apply()
    assert [result.error for result in results] == [None, None]
    assert watched.lake_rows("s.t").num_rows == 19


def test_a_copy_that_is_newer_than_what_was_received_is_told_too(source: str, tmp_path: Path) -> None:
    """The receiver is behind: it sees that the publication moved before it has come to where the copy is."""
    watched = Watched(source, tmp_path).start()
    watched.execute("insert into s.u values (21, 'x')")
    place = watched.source_lsn()
    of_t = next(relation for relation in watched.relations if relation.table.name == "t")
    watched.execute("insert into s.u values (22, 'x')")
    watched.copy(of_t, place)
    watched.execute(*FEWER_KINDS[0], *FEWER_KINDS[1], "insert into s.u values (23, 'x')")
    with watched.receiving(EAGER) as receiver:
        wait_until_seen(receiver, watched.source_lsn())
        wait_until(lambda: receiver.progress.durable_lsn > place + 100 or receiver.request_keepalive())

        def is_announced_again() -> bool:
            told = [row for row in watched.publication_statuses() if row["relation_id"] == of_t.oid]
            return told[-1]["commit_lsn"] > place

        wait_until(lambda: is_announced_again() or _write(watched), what="the second announcement")
    result = watched.result("t")
    assert result.error is not None
    assert "the publication was altered" in result.error


PLAIN = "create table s.w(id int primary key, v text)"
SINCE_COPIED = {
    "dropped": (ALL, PLAIN, ["drop table s.w"]),
    "unlogged": (ALL, PLAIN, ["alter table s.w set unlogged"]),
    "moved out of a published schema, and back": (
        "tables in schema s with (publish_via_partition_root = true)",
        PLAIN,
        ["alter table s.w set schema elsewhere", "alter table elsewhere.w set schema s"],
    ),
    "an unlogged partition": (
        ALL,
        f"{PLAIN} partition by range (id)",
        ["create unlogged table s.w1 partition of s.w for values from (0) to (10)"],
    ),
}


@pytest.mark.parametrize("move", SINCE_COPIED)
@pytest.mark.thorough(
    "the same test, of one moved out of a schema", "unlogged", "an unlogged partition", "dropped"
)
def test_a_table_that_was_copied_since_is_looked_at_before_its_first_change(
    source: str, tmp_path: Path, move: str
) -> None:
    kind, make, moves = SINCE_COPIED[move]
    watched = Watched(source, tmp_path, kind).start()
    with watched.receiving(EAGER) as receiver:
        wait_until_seen(receiver, watched.source_lsn())
        watched.execute(make)
        with watched.source() as connection:
            added = find_relation(connection, TableName("s", "w"), watched.pipeline.publication)
        assert added is not None
        watched.copy(added, watched.source_lsn())
        watched.relations.append(added)
        watched.execute("delete from s.u where id = 1")
        wait_until_seen(receiver, watched.source_lsn())
        watched.execute(*moves, "delete from s.u where id = 2")
        wait_until_seen(receiver, watched.source_lsn())
        # The reported change of the publication precedes what was durable then. A part of it that the copy
        # does not see is reported again.
        watched.execute("delete from s.u where id = 3")
        wait_until_seen(receiver, watched.source_lsn())
    assert watched.result("w").error is not None
    assert watched.result("t").error is None
    assert watched.result("u").error is None


def _write(watched: Watched) -> None:
    watched.execute("update s.u set v = 'y' where id = 1")


def test_restarted_receiver_does_not_record_publication_change_again(source: str, tmp_path: Path) -> None:
    watched = Watched(source, tmp_path).start()
    watched.execute(*FEWER_KINDS[0], *FEWER_KINDS[1])
    with watched.receiving(EAGER) as receiver:
        wait_until_seen(receiver, watched.source_lsn())
        before = watched.source_lsn()
        wait_until(lambda: receiver.progress.durable_lsn >= before or receiver.request_keepalive())
        watched.execute("insert into s.u values (100, 'x')")
        wait_until_seen(receiver, watched.source_lsn())
    watched.receive()
    said = watched.publication_statuses()
    watched.receive()
    watched.receive()
    assert said
    assert watched.publication_statuses() == said
