"""Tables that become unlogged, for a while or for good, in publications that keep them without a word.

Each course of events has a table of its own; all the tables of a test are on one stream.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.drift import DriftKind
from tests.support.altered import Altered, done
from tests.support.courses import Courses
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

TABLE = (
    "create table t (id int primary key, n int)",
    "insert into t values (1, 1), (2, 2)",
)
ROW = "insert into t values (9, 9)"
PUBLICATIONS = {"of all tables": "all tables", "of schemas": "tables in schema {schemas}"}
FOR_A_WHILE = {
    "a row deleted": ["alter table t set unlogged", "delete from t where id = 1", "alter table t set logged"],
    "nothing done": ["alter table t set unlogged", "alter table t set logged"],
    "all at once": ["begin; alter table t set unlogged; delete from t; alter table t set logged; commit"],
    "before a wider type": [
        "alter table t set unlogged",
        "delete from t where id = 1",
        "alter table t set logged",
        "alter table t alter n type bigint",
    ],
    "after a TRUNCATE": [
        "truncate t",
        "alter table t set unlogged",
        "insert into t values (3, 3)",
        "alter table t set logged",
    ],
}
UNEXPLAINED = {"VACUUM FULL": ["vacuum full t"], "a wider type": ["alter table t alter n type bigint"]}
EXPLAINED = {
    "TRUNCATE": ["truncate t"],
    "TRUNCATE and rows at once": ["begin; truncate t; insert into t values (3, 3); commit"],
    "TRUNCATE more than once": ["truncate t", "insert into t values (3, 3)", "truncate t", "truncate t"],
    "TRUNCATE after it was unlogged for a while": [
        "alter table t set unlogged",
        "alter table t set logged",
        "truncate t",
    ],
    "a new column": ["alter table t add m int default 7"],
    "REINDEX": ["reindex table t", "analyze t"],
}


STAYS_UNLOGGED = "stays unlogged"
UNLOGGED_MEANWHILE = "may have been unlogged meanwhile"
ATTACH = "alter table whole attach partition t for values from (0) to (100)"
PARTITION = (
    "create table whole (id int primary key, n int) partition by range (id)",
    *TABLE,
    ATTACH,
)
OF_A_PARTITION = {
    "detached": ["alter table whole detach partition t", "delete from t", ATTACH],
    "detached at once": [f"begin; alter table whole detach partition t; delete from t; {ATTACH}; commit"],
    "unlogged": ["alter table t set unlogged", "delete from t", "alter table t set logged"],
}

ONE_OF_EACH = pytest.mark.thorough("the same test, of schemas step by step")
publications = pytest.mark.parametrize("publication", PUBLICATIONS.values(), ids=PUBLICATIONS)
with_and_without_event_trigger = pytest.mark.parametrize(
    "event_trigger", [False, True], ids=["", "event trigger"]
)


def taken(
    dsn: str, folder: Path, courses: Iterable[str], publication: str, *, event_trigger: bool
) -> Courses:
    options = {"publication": "everything", "publication_mode": "use", "event_trigger": event_trigger}
    made = Courses(dsn, folder, courses, TABLE, **options)
    execute(
        dsn,
        f"create publication everything for {publication}".format(schemas=", ".join(made.schemas.values())),
    )
    return made.take()


@publications
@with_and_without_event_trigger
@pytest.mark.thorough(
    "the same test, of all tables without an event trigger",
    "-of schemas",
    "event trigger-of schemas",
    "event trigger-of all tables",
)
def test_a_table_that_is_or_was_unlogged_stops(
    dsn: str, tmp_path: Path, publication: str, *, event_trigger: bool
) -> None:
    stopping = {STAYS_UNLOGGED: ["alter table t set unlogged", "delete from t"], **FOR_A_WHILE}
    courses = taken(dsn, tmp_path, stopping, publication, event_trigger=event_trigger)
    courses.execute(STAYS_UNLOGGED, ROW)
    courses.follow_all()
    for course, statements in stopping.items():
        courses.execute(course, *statements)
        said = courses.look(course).reason
        if course == STAYS_UNLOGGED:
            assert said == "the table is unlogged: its changes are not in the stream"
        else:
            assert UNLOGGED_MEANWHILE in said, course
            courses.execute(course, ROW)
    for course, found in courses.follow().items():
        # Of one that stays unlogged nothing comes any more, and yet it is noticed.
        assert "unlogged" in found.error, course
    courses.execute(
        STAYS_UNLOGGED, "alter table t add m int", "alter table t set logged", "insert into t values (10, 10)"
    )
    found = courses.follow()[STAYS_UNLOGGED]
    assert "unlogged" in found.error
    assert "resnapshot it" in found.hint


@publications
@with_and_without_event_trigger
@pytest.mark.thorough(
    "the same test: of all tables without an event trigger, of schemas with one",
    "-of schemas",
    "event trigger-of all tables",
)
def test_only_an_event_trigger_tells_another_rewrite_from_that(
    dsn: str, tmp_path: Path, publication: str, *, event_trigger: bool
) -> None:
    courses = taken(dsn, tmp_path, UNEXPLAINED, publication, event_trigger=event_trigger)
    for course, statements in UNEXPLAINED.items():
        courses.execute(course, ROW, *statements, "insert into t values (10, 10)")
    if event_trigger:
        courses.follow_all()
        courses.execute_in_all("insert into t values (11, 11)", "vacuum full t", "delete from t where id = 2")
        courses.follow_all()
        courses.assert_all_as_source()
    else:
        for course, found in courses.follow().items():
            assert UNLOGGED_MEANWHILE in found.error, course


@pytest.mark.parametrize(
    ("publication", "at_once"),
    [
        pytest.param(PUBLICATIONS["of all tables"], True, id="of all tables, at once", marks=ONE_OF_EACH),
        pytest.param(
            PUBLICATIONS["of all tables"], False, id="of all tables, step by step", marks=ONE_OF_EACH
        ),
        pytest.param(PUBLICATIONS["of schemas"], True, id="of schemas, at once", marks=ONE_OF_EACH),
        pytest.param(PUBLICATIONS["of schemas"], False, id="of schemas, step by step"),
    ],
)
@with_and_without_event_trigger
@pytest.mark.thorough(
    "the same test, without an event trigger",
    "event trigger-of schemas, step by step",
)
def test_truncate_new_column_and_reindex_do_not_stop_table(
    dsn: str, tmp_path: Path, publication: str, *, event_trigger: bool, at_once: bool
) -> None:
    explained = {
        course: statements
        for course, statements in EXPLAINED.items()
        # Looked at in between, one that is unlogged is stopped.
        if "set unlogged" not in " ".join(statements) or (at_once and not event_trigger)
    }
    courses = taken(dsn, tmp_path, explained, publication, event_trigger=event_trigger)
    for step in zip_longest(*explained.values()):
        for course, statement in zip(explained, step, strict=True):
            if statement is not None:
                courses.execute(course, statement)
        if not at_once:
            courses.follow_all()
    courses.execute_in_all("insert into t values (8, 8)")
    courses.follow_all()
    courses.execute_in_all(ROW)
    courses.follow_all()
    courses.assert_all_as_source()


def test_a_table_that_is_published_by_name_cannot_become_unlogged_and_may_be_rewritten(dsn, tmp_path):
    execute(dsn, *TABLE)
    taken = Altered(dsn, tmp_path).take()
    execute(dsn, ROW, "vacuum full t", "insert into t values (10, 10)")
    done(taken.follow())
    taken.assert_as_source()


def test_a_partition_that_is_published_through_its_table_alone_is_watched_likewise(
    dsn: str, tmp_path: Path
) -> None:
    options = {"publication": "everything", "publication_mode": "use"}
    courses = Courses(dsn, tmp_path, OF_A_PARTITION, PARTITION, **options)
    wholes = ", ".join(f"{schema}.whole" for schema in courses.schemas.values())
    execute(dsn, f"create publication everything for table {wholes}")
    courses.take()
    for course, statements in OF_A_PARTITION.items():
        courses.execute(course, *statements)
        assert courses.look(course).kind is DriftKind.UNSAFE, course
    courses.execute_in_all(ROW)
    for course, found in courses.follow().items():
        assert "missing" in found.error, course
