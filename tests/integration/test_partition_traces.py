"""Partitions that change unobserved and are then changed back: the table stops, since no stream reports it.

Each course of events ends with a row in every partition, or with none at all: then the catalog is compared.
Each has a table of its own; all the tables of a test are on one stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg2
import pytest

from airflow_provider_pgrepl.replication.source.connection import Connection
from tests.conftest import closing_connection
from tests.support.courses import Courses
from tests.support.received import wait_until_seen
from tests.support.replicated import execute, wait_until

pytestmark = pytest.mark.slow

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
UNLOGGED = {
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
CAME_TWICE = [
    "create table p (like t including all)",
    ATTACH,
    NEW_ROW,
    "alter table t detach partition p",
    "delete from p",
]
"""Rows that it had the first time were sent."""
CAME_EMPTY_AGAIN = {
    "empty": [*CAME_TWICE, ATTACH],
    "vacuumed": [*CAME_TWICE, "vacuum p", ATTACH],
    "filled": [*CAME_TWICE, ATTACH, "insert into t values (32, 32)"],
    "vacuumed and filled": [*CAME_TWICE, "vacuum p", ATTACH, "insert into t values (32, 32)"],
}
KEY_CHANGED = [
    "alter table low alter n set not null",
    "create unique index low_n on low (n)",
    "alter table low replica identity using index low_n",
    "delete from low where id = 1",
    "alter table low replica identity default",
]
CAME_EMPTY = ["create table p (like t including all)", ATTACH]
CAME_WHILE_OLDER_ROWS_ARE_TO_COME = {
    "empty": [ROWS, *CAME_EMPTY],
    "empty and analyzed": [ROWS, *CAME_EMPTY, "analyze p"],
    "filled": [ROWS, *CAME_EMPTY, NEW_ROW],
    "filled and analyzed": [ROWS, *CAME_EMPTY, NEW_ROW, "analyze p"],
}
TOLD_IN_FULL = {
    "truncated": ["truncate t", ROWS],
    "truncated after a row": ["begin; insert into t values (3, 3); truncate t; commit", ROWS],
    "truncated around a row": ["begin; truncate t; insert into t values (3, 3); truncate t; commit", ROWS],
    "maintained": ["reindex table low", "analyze t", "cluster", ROWS],
    "a new partition": [NEW, ROWS],
    "attached empty before its first row": [*CAME_EMPTY, NEW_ROW, ROWS],
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

KINDS_OF_TABLE = {"no partition": [ROOT], "partitions": TABLE}
OF_EITHER_TABLE = (
    "before 15 relfrozenxid does not tell that no VACUUM ran since the partition was made, and a walsender"
    " that has decoded a row of a table before it was attached sends none of its later rows"
)
SENT_SINCE_15 = "emptied before it was attached"
"""Before, the walsender that has decoded the first row sends no later one: the table stops."""

ONE_OF_EACH = pytest.mark.thorough("the same test away without, and running with an event trigger")
with_and_without_event_trigger = pytest.mark.parametrize(
    "event_trigger",
    [pytest.param(False, id="", marks=pytest.mark.thorough("the same with the event trigger")), True],
    ids=["", "event trigger"],
)


@with_and_without_event_trigger
@pytest.mark.thorough("test_no_row_is_needed_to_notice_it, and partitions that came; unit/test_drift_traces")
def test_reattached_unlogged_or_truncated_partition_or_key_change_stops_table(
    dsn: str, tmp_path: Path, *, event_trigger: bool
) -> None:
    stopping = {
        **{("attached again", case): statements for case, statements in ATTACHED_AGAIN.items()},
        **{("unlogged", case): statements for case, statements in UNLOGGED.items()},
        **{("came twice", case): statements for case, statements in CAME_EMPTY_AGAIN.items()},
        **{("truncated", case): statements for case, statements in TRUNCATED.items()},
        ("key", "changed and changed back"): KEY_CHANGED,
    }
    courses = Courses(dsn, tmp_path, stopping, TABLE, event_trigger=event_trigger).take()
    for course, statements in stopping.items():
        courses.execute(course, *statements)
        said = courses.look(course, had_rows=True).reason
        if course[0] == "attached again":
            assert "was detached and attached again: changes between are missing" in said, course
        if course[0] == "unlogged":
            assert "is unlogged: its changes are not in the stream" in said, course
    courses.execute_in_all(ROWS)
    for course, found in courses.follow().items():
        assert found.error is not None, f"{course}: rows that are gone are in the lake still"
        match course[0]:
            case "attached again":
                # Step by step, the event trigger reports it before it is attached again.
                assert "attached again" in found.error or "detached or dropped" in found.error, course
                assert found.error_kind == "DriftError", course
            case "unlogged":
                assert "is unlogged: its changes are not in the stream" in found.error, course
                assert found.hint.startswith("make it an ordinary, logged table, then resnapshot it"), course
            case "truncated":
                assert found.error_kind == "DriftError", course


@pytest.mark.parametrize(
    ("running", "event_trigger"),
    [
        pytest.param(False, False, id="away"),
        pytest.param(True, True, id="running, event trigger"),
        pytest.param(True, False, id="running", marks=ONE_OF_EACH),
        pytest.param(False, True, id="away, event trigger", marks=ONE_OF_EACH),
    ],
)
def test_no_row_is_needed_to_notice_it(
    dsn: str, tmp_path: Path, *, running: bool, event_trigger: bool
) -> None:
    stopping = ATTACHED_AGAIN | UNLOGGED
    courses = Courses(dsn, tmp_path, stopping, TABLE, event_trigger=event_trigger).take()

    def run() -> None:
        for course, statements in stopping.items():
            courses.execute(course, *statements)

    if running:
        with courses.receiving() as receiver:
            wait_until_seen(receiver, courses.source_lsn())
            run()
            wait_until_seen(receiver, courses.source_lsn())
    else:
        run()
        courses.receive()
    assert [course for course, found in courses.bring_all().items() if found.error is None] == []


@with_and_without_event_trigger
def test_streamed_partition_ddl_is_followed_and_attach_with_rows_stops_table(
    dsn: str, tmp_path: Path, *, event_trigger: bool
) -> None:
    attached = "attached with rows"
    followed = CAME_WHILE_OLDER_ROWS_ARE_TO_COME | TOLD_IN_FULL | {attached: [NEW, "create table q (like t)"]}
    courses = Courses(dsn, tmp_path, followed, TABLE, event_trigger=event_trigger).take()
    for course, statements in followed.items():
        courses.execute(course, *statements)
    courses.follow_all()
    courses.assert_all_as_source()
    for course in CAME_WHILE_OLDER_ROWS_ARE_TO_COME:
        courses.execute(course, "insert into t values (32, 32)")
    courses.execute(attached, "alter table q add primary key (id)", "insert into q values (41, 41)")
    courses.follow_all()
    courses.assert_all_as_source()
    courses.execute(attached, "alter table t attach partition q for values from (40) to (50)")
    # No row more is needed to notice those that it had.
    stopped = {course: found.error for course, found in courses.follow().items() if found.error is not None}
    assert list(stopped) == [attached]
    partition = f"{courses.schemas[attached]}.q"
    assert f"partition {partition} was attached and may have held rows" in stopped[attached]


def by_table(
    courses: dict[str, list[str]],
) -> tuple[dict[tuple[str, str], list[str]], dict[tuple[str, str], Sequence[str]]]:
    """The courses on a table with and on one without partitions, and the statements that make each table."""
    found = {(table, case): courses[case] for table in KINDS_OF_TABLE for case in courses}
    return found, {course: KINDS_OF_TABLE[course[0]] for course in found}


def is_sent(server_version: int) -> bool:
    """Return True if the rows of `SENT_SINCE_15` are sent."""
    return server_version >= 150000


@pytest.mark.differs_by_major(OF_EITHER_TABLE, since=(15,))
def test_a_partition_that_came_and_changed_while_nobody_looked_stops_the_table(
    dsn: str, tmp_path: Path, pg: Connection
) -> None:
    unsent = {} if is_sent(pg.server_version) else {SENT_SINCE_15: CAME_IN_ORDER[SENT_SINCE_15]}
    stopping, tables = by_table(CAME_AND_CHANGED | unsent)
    courses = Courses(dsn, tmp_path, stopping, tables).take()
    for course, statements in stopping.items():
        courses.execute(course, *statements)
        assert courses.look(course, had_rows=True).reason, course
    courses.execute_in_all("insert into t values (35, 35)")
    kinds = {course: found.error_kind for course, found in courses.follow().items()}
    assert kinds == dict.fromkeys(stopping, "DriftError")


@pytest.mark.differs_by_major(OF_EITHER_TABLE, since=(15,))
@pytest.mark.thorough("test_streamed_partition_ddl_is_followed_and_attach_with_rows_stops_table")
def test_a_partition_that_came_in_order_is_followed(dsn: str, tmp_path: Path, pg: Connection) -> None:
    sent = [case for case in CAME_IN_ORDER if case != SENT_SINCE_15 or is_sent(pg.server_version)]
    followed, tables = by_table({case: CAME_IN_ORDER[case] for case in sent})
    courses = Courses(dsn, tmp_path, followed, tables).take()
    for course, statements in followed.items():
        courses.execute(course, *statements, "insert into t values (35, 35)")
    courses.follow_all()
    courses.assert_all_as_source()


def test_a_foreign_partition_stops_the_table(dsn: str, tmp_path: Path) -> None:
    execute(
        dsn, "create foreign data wrapper nothing", "create server elsewhere foreign data wrapper nothing"
    )
    table = (
        "create table t (id int not null, n int) partition by range (id)",
        "create table low partition of t for values from (0) to (10)",
        "alter table low replica identity full",
        "alter table t replica identity full",
    )
    courses = Courses(dsn, tmp_path, FOREIGN, table).take()
    said = {course: f"partition {schema}.p is a foreign table" for course, schema in courses.schemas.items()}
    for course, statements in FOREIGN.items():
        courses.execute(course, *statements)
        assert said[course] in courses.look(course, had_rows=True).reason, course
    courses.execute_in_all("insert into t values (5, 5)")
    for course, found in courses.follow().items():
        assert said[course] in found.error, course


def is_detach_pending(dsn: str, partition: str) -> bool:
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select inhdetachpending from pg_inherits where inhrelid = %s::regclass", (partition,))
        return bool(cursor.fetchone()[0])


@with_and_without_event_trigger
def test_a_partition_that_is_being_detached_is_none_any_more(
    dsn: str, tmp_path: Path, *, event_trigger: bool
) -> None:
    """DETACH … CONCURRENTLY that was interrupted: it sends nothing as the table's, and the table lacks it."""
    courses = Courses(dsn, tmp_path, ["t"], TABLE, event_trigger=event_trigger).take()
    reader, detacher = psycopg2.connect(dsn), psycopg2.connect(dsn)
    detacher.autocommit = True
    with reader.cursor() as cursor, detacher.cursor() as other, ThreadPoolExecutor(1) as thread:
        cursor.execute("select * from c0.t")
        pid = detacher.info.backend_pid
        detaching = thread.submit(other.execute, "alter table c0.t detach partition c0.low concurrently")
        # Its first transaction has ended then, and it waits for the reader.
        wait_until(lambda: is_detach_pending(dsn, "c0.low"), what="the partition to be detached")
        execute(dsn, f"select pg_cancel_backend({pid})")
        with pytest.raises(psycopg2.errors.QueryCanceled):
            detaching.result()
    reader.close()
    detacher.close()
    assert "partition c0.low was detached or dropped" in courses.look("t", had_rows=True).reason
    if event_trigger:
        # A command that was interrupted fires none.
        courses.execute("t", "alter table t detach partition low finalize")
    courses.execute("t", "insert into t values (15, 15)", "insert into low values (5, 5)")
    assert "partition c0.low was detached or dropped" in courses.follow()["t"].error
