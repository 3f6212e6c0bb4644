"""What happens to partitions while nobody looks, and is undone again: the table stops, for no stream tells.

Each course of events ends with a row in every partition, or with none at all: then the catalog is compared.
"""

from __future__ import annotations

from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.drift.judge import judge_catalog
from airflow_provider_pgrepl.replication.lake.applying.table_result import TableResult
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from tests.support.altered import Altered, done
from tests.support.received import wait_until_seen
from tests.support.replicated import execute

TABLE = (
    "create table t (id int primary key, n int) partition by range (id)",
    "create table low partition of t for values from (0) to (10)",
    "create table high partition of t for values from (10) to (30) partition by range (id)",
    "create table high_1 partition of high for values from (10) to (20)",
    "create table high_2 partition of high for values from (20) to (30)",
    "insert into t values (1, 1), (2, 2), (11, 11), (12, 12), (21, 21)",
)
ROOT = "create table t (id int primary key, n int) partition by range (id)"
ROWS = "insert into t values (5, 5), (15, 15), (25, 25) on conflict do nothing"
LOW, HIGH = "for values from (0) to (10)", "for values from (10) to (30)"
LATER = "for values from (30) to (40)"

ATTACHED_AGAIN = {
    "a row deleted": [
        "alter table t detach partition low",
        "delete from low where id = 1",
        f"alter table t attach partition low {LOW}",
    ],
    "nothing done, all in one transaction": [
        f"begin; alter table t detach partition low; alter table t attach partition low {LOW}; commit"
    ],
    "detached without a long lock": [
        "alter table t detach partition low concurrently",
        "update low set n = 7",
        f"alter table t attach partition low {LOW}",
    ],
    "a middle one": [
        "alter table t detach partition high",
        "delete from high where id = 11",
        f"alter table t attach partition high {HIGH}",
    ],
    "below a middle one": [
        "alter table high detach partition high_1",
        "truncate high_1",
        "alter table high attach partition high_1 for values from (10) to (20)",
    ],
    "with other bounds": [
        "alter table t detach partition low",
        "insert into low values (-1, -1)",
        "alter table t attach partition low for values from (-10) to (10)",
    ],
}
UNCHANGED_VALUE = {
    "made as an unlogged one": ["create unlogged table p partition of t for values from (30) to (40)"],
    "attached as an unlogged one": [
        "create unlogged table p (like t including all)",
        f"alter table t attach partition p {LATER}",
    ],
    "became an unlogged one": ["alter table low set unlogged"],
    "unlogged below a middle one": [
        "create table more partition of t for values from (30) to (50) partition by range (id)",
        "create unlogged table p partition of more for values from (30) to (40)",
    ],
}
FOREIGN = {
    "made as a foreign one": [f"create foreign table p partition of t {LATER} server elsewhere"],
    "attached as a foreign one": [
        "create foreign table p (id int not null, n int) server elsewhere",
        f"alter table t attach partition p {LATER}",
    ],
}
TRUNCATED = {
    "before a wider type": ["truncate low", "alter table t alter n type bigint"],
    "after a wider type": ["alter table t alter n type bigint", "truncate low"],
    "before a wider type in its transaction": [
        "begin; truncate low; alter table t alter n type bigint; commit"
    ],
    "after a wider type in its transaction": [
        "begin; alter table t alter n type bigint; truncate low; commit"
    ],
    "in the middle, beside a new column": ["begin; truncate high; alter table t add m int; commit"],
    "with the whole table before it": ["truncate t", ROWS, "truncate low"],
    "with the whole table and rows before it": [
        "begin; truncate t; insert into t values (1, 1), (11, 11); truncate low; commit"
    ],
    "with the whole table and rows before it, below a savepoint": [
        "begin; truncate t; insert into t values (1, 1), (11, 11); savepoint s; truncate low; commit"
    ],
    "all at once, with the whole table and rows before it": [
        "begin; truncate t; insert into t values (1, 1), (11, 11); truncate low, high; commit"
    ],
    "unlogged for a while": [
        "alter table low set unlogged",
        "delete from low",
        "alter table low set logged",
    ],
}
NEW = f"create table p partition of t {LATER}"
NEW_ROW = "insert into t values (31, 31)"
BROUGHT = ["create table p (like t including all)", "insert into p values (31, 31)"]
ATTACH = f"alter table t attach partition p {LATER}"
CAME_AND_CHANGED = {
    "truncated": [NEW, NEW_ROW, "truncate p"],
    "unlogged for a while": [
        NEW,
        NEW_ROW,
        "alter table p set unlogged",
        "delete from p",
        "alter table p set logged",
    ],
    "its rows rewritten": [*BROUGHT, ATTACH, "alter table t alter n type bigint"],
    "its rows rewritten at once": [*BROUGHT, f"begin; {ATTACH}; alter table t alter n type bigint; commit"],
    "its rows rewritten by itself at once": [
        *BROUGHT,
        f"begin; {ATTACH}; alter table p set unlogged; alter table p set logged; commit",
    ],
    "its rows rewritten, granted later": [
        *BROUGHT,
        f"begin; {ATTACH}; alter table p set unlogged; alter table p set logged; commit",
        "grant select on p to public",
    ],
    "its values rewritten": [NEW, NEW_ROW, "alter table t alter n type int using n * 2"],
    "its values rewritten by a wider type": [NEW, NEW_ROW, "alter table t alter n type bigint using n * 2"],
    "made and its values rewritten at once": [
        f"begin; {NEW}; {NEW_ROW}; alter table t alter n type bigint using n * 2; commit"
    ],
    "made and its values rewritten in their type at once": [
        f"begin; {NEW}; {NEW_ROW}; alter table t alter n type int using n * 2; commit"
    ],
    "a default for its rows": [NEW, NEW_ROW, "alter table t add m int default 1 + random()::int"],
    "a default that is forgotten": [NEW, NEW_ROW, "alter table t add m int default 7", "vacuum full p"],
}
CAME_IN_ORDER = {
    "made and filled": [NEW, NEW_ROW],
    "emptied before it was attached": [
        *BROUGHT,
        "truncate p",
        ATTACH,
        NEW_ROW,
    ],
    "attached and filled at once": [
        f"begin; create table p (like t including all); {ATTACH}; {NEW_ROW}; commit"
    ],
    "truncated with the whole table": [NEW, NEW_ROW, "truncate t", "insert into t values (32, 32)"],
    "a default": [NEW, NEW_ROW, "alter table t add m int default 7"],
    "a longer text": [
        NEW,
        NEW_ROW,
        "alter table t add s varchar(5)",
        "alter table t alter s type varchar(9)",
    ],
    "analyzed and indexed": [NEW, NEW_ROW, "analyze p", "create index on t (n)", "vacuum t"],
}


@pytest.fixture(params=[False, True], ids=["", "event trigger"])
def taken(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Altered:
    execute(dsn, *TABLE)
    return Altered(dsn, tmp_path, event_trigger=request.param).take()


def end(taken: Altered, dsn: str, statements: list[str]) -> TableResult:
    execute(dsn, *statements, ROWS)
    return taken.follow()


def judged(taken: Altered) -> str:
    """What a look at the catalog says."""
    with taken.source() as source:
        assert taken.relation is not None
        current = read_relation(source, taken.relation.oid, taken.pipeline.publication, had_rows=True)
    return judge_catalog(taken.relation, current, taken.pipeline.choices(taken.relation.table)).reason


@pytest.mark.parametrize("statements", ATTACHED_AGAIN.values(), ids=ATTACHED_AGAIN)
def test_a_partition_that_was_attached_again_stops_the_table(taken, dsn, statements):
    execute(dsn, *statements)
    assert "was detached and attached again: changes between are missing" in judged(taken)
    found = end(taken, dsn, [])
    # Step by step, the event trigger tells of it before it is attached again.
    assert "attached again" in found.error or "detached or dropped" in found.error
    assert found.error_kind == "DriftError"


@pytest.mark.parametrize("statements", UNCHANGED_VALUE.values(), ids=UNCHANGED_VALUE)
def test_an_unlogged_partition_stops_the_table(taken, dsn, statements):
    execute(dsn, *statements)
    assert "is unlogged: its changes are not in the stream" in judged(taken)
    found = end(taken, dsn, [])
    assert "is unlogged: its changes are not in the stream" in found.error
    assert found.hint.startswith("make it an ordinary, logged table, then resnapshot it")


@pytest.mark.parametrize("running", [False, True], ids=["away", "running"])
@pytest.mark.parametrize("statements", [*ATTACHED_AGAIN.values(), *UNCHANGED_VALUE.values()])
def test_no_row_is_needed_to_notice_it(taken, dsn, statements, running):
    if running:
        with taken.receiving() as receiver:
            wait_until_seen(receiver, taken.source_lsn())
            execute(dsn, *statements)
            wait_until_seen(receiver, taken.source_lsn())
    else:
        execute(dsn, *statements)
        taken.receive()
    assert taken.bring().error is not None


def test_a_partition_that_had_rows_when_it_was_attached_is_noticed_without_another(taken, dsn):
    execute(dsn, f"create table p partition of t {LATER}", "create table q (like t)")
    done(taken.follow())
    execute(dsn, "alter table q add primary key (id)", "insert into q values (41, 41)")
    done(taken.follow())
    execute(dsn, "alter table t attach partition q for values from (40) to (50)")
    assert "partition public.q was attached and may have held rows" in taken.follow().error


@pytest.mark.parametrize("vacuum", [(), ("vacuum p",)], ids=["", "vacuumed"])
@pytest.mark.parametrize("again", [(), ("insert into t values (32, 32)",)], ids=["empty", "filled"])
def test_a_partition_that_came_twice_while_nobody_looked_stops_the_table(taken, dsn, vacuum, again):
    """The last time it was empty; rows that it had the first time were sent."""
    execute(
        dsn,
        "create table p (like t including all)",
        f"alter table t attach partition p {LATER}",
        "insert into t values (31, 31)",
        "alter table t detach partition p",
        "delete from p",
        *vacuum,
        f"alter table t attach partition p {LATER}",
        *again,
    )
    assert end(taken, dsn, []).error is not None, "a row that was deleted is in the lake"


@pytest.mark.parametrize("analyzed", [(), ("analyze p",)], ids=["", "analyzed"])
@pytest.mark.parametrize("first", [(), ("insert into t values (31, 31)",)], ids=["empty", "filled"])
def test_a_partition_that_came_while_older_rows_are_to_come_is_followed(taken, dsn, first, analyzed):
    execute(
        dsn,
        ROWS,
        "create table p (like t including all)",
        f"alter table t attach partition p {LATER}",
        *first,
        *analyzed,
    )
    done(taken.follow())
    execute(dsn, "insert into t values (32, 32)")
    done(taken.follow())
    taken.assert_as_source()


def test_a_partition_that_was_attached_empty_before_its_first_row_is_followed(taken, dsn):
    execute(dsn, "create table p (like t including all)", f"alter table t attach partition p {LATER}")
    execute(dsn, "insert into t values (31, 31)", ROWS)
    done(taken.follow())
    taken.assert_as_source()


@pytest.mark.parametrize("server_dsn", ["dsn", "debian_dsn"])
@pytest.mark.parametrize("table", [[ROOT], TABLE], ids=["no partition", "partitions"])
@pytest.mark.parametrize("statements", CAME_AND_CHANGED.values(), ids=CAME_AND_CHANGED)
def test_a_partition_that_came_and_changed_while_nobody_looked_stops_the_table(
    request, tmp_path, server_dsn, table, statements
):
    dsn = request.getfixturevalue(server_dsn)
    execute(dsn, *table)
    taken = Altered(dsn, tmp_path).take()
    execute(dsn, *statements)
    assert judged(taken)
    execute(dsn, "insert into t values (35, 35)")
    assert taken.follow().error_kind == "DriftError"


@pytest.mark.parametrize("server_dsn", ["dsn", "debian_dsn"])
@pytest.mark.parametrize("table", [[ROOT], TABLE], ids=["no partition", "partitions"])
@pytest.mark.parametrize("statements", CAME_IN_ORDER.values(), ids=CAME_IN_ORDER)
def test_a_partition_that_came_in_order_is_followed(request, tmp_path, server_dsn, table, statements):
    dsn = request.getfixturevalue(server_dsn)
    execute(dsn, *table)
    taken = Altered(dsn, tmp_path).take()
    execute(dsn, *statements, "insert into t values (35, 35)")
    done(taken.follow())
    taken.assert_as_source()


@pytest.mark.parametrize("statements", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_partition_stops_the_table(dsn, tmp_path, statements):
    execute(
        dsn,
        "create table t (id int not null, n int) partition by range (id)",
        "create table low partition of t for values from (0) to (10)",
        "alter table low replica identity full",
        "alter table t replica identity full",
        "create foreign data wrapper nothing",
        "create server elsewhere foreign data wrapper nothing",
    )
    taken = Altered(dsn, tmp_path).take()
    execute(dsn, *statements)
    assert "partition public.p is a foreign table" in judged(taken)
    execute(dsn, "insert into t values (5, 5)")
    assert "partition public.p is a foreign table" in taken.follow().error


@pytest.mark.parametrize("statements", TRUNCATED.values(), ids=TRUNCATED)
def test_a_truncate_of_a_partition_is_hidden_by_nothing(taken, dsn, statements):
    found = end(taken, dsn, statements)
    assert found.error_kind == "DriftError", "rows that were truncated are in the lake still"


@pytest.mark.parametrize(
    "statements",
    [
        ["truncate t", ROWS],
        ["begin; insert into t values (3, 3); truncate t; commit", ROWS],
        ["begin; truncate t; insert into t values (3, 3); truncate t; commit", ROWS],
        ["reindex table low", "analyze t", "cluster", ROWS],
        ["create table p partition of t for values from (30) to (40)", ROWS],
    ],
    ids=lambda statements: "; ".join(statements[:-1]),
)
def test_what_the_stream_tells_in_full_is_followed(taken, dsn, statements):
    execute(dsn, *statements)
    done(taken.follow())
    taken.assert_as_source()


def test_a_partition_that_is_being_detached_is_none_any_more(taken, dsn):
    """DETACH … CONCURRENTLY that was interrupted: it sends nothing as the table's, and the table lacks it."""
    reader, detacher = psycopg2.connect(dsn), psycopg2.connect(dsn)
    detacher.autocommit = True
    with reader.cursor() as cursor, detacher.cursor() as other:
        cursor.execute("select * from t")
        other.execute("set statement_timeout = '300ms'")
        with pytest.raises(psycopg2.errors.QueryCanceled):
            other.execute("alter table t detach partition low concurrently")
    reader.close()
    detacher.close()
    assert "partition public.low was detached or dropped" in judged(taken)
    if taken.pipeline.event_trigger:
        # A command that was interrupted fires none.
        execute(dsn, "alter table t detach partition low finalize")
    execute(dsn, "insert into t values (15, 15)", "insert into low values (5, 5)")
    assert "partition public.low was detached or dropped" in taken.follow().error


def test_a_partition_that_changed_its_key_stops_the_table(taken, dsn):
    execute(
        dsn,
        "alter table low alter n set not null",
        "create unique index low_n on low (n)",
        "alter table low replica identity using index low_n",
        "delete from low where id = 1",
        "alter table low replica identity default",
    )
    found = end(taken, dsn, [])
    assert found.error is not None, "a row that was deleted is in the lake still"
