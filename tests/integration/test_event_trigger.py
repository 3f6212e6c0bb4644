"""The event trigger: DDL has its exact place in the stream, with the catalog of that place."""

from __future__ import annotations

from dataclasses import replace
from itertools import groupby

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.replication.changelog.messages import read_messages
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.lake.delta.table import forget
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from airflow_provider_pgrepl.replication.source.event_trigger.sql import trigger_names
from tests.conftest import closing_connection
from tests.support.handed import Handed
from tests.support.replicated import execute, wait_until
from tests.support.watched import SHAPE, Watched, function, insert, weak_role

pytestmark = pytest.mark.slow

CHANGES = {
    "a column dropped and added again": "alter table t drop v, add v text",
    "an equal type by an expression": "alter table t alter v type text using upper(v)",
    "a label renamed": "alter type mood rename value 'sad' to 'blue'",
    "a label added": "alter type mood add value 'mixed'",
    "a field renamed": "alter type place rename attribute street to road",
    "a field added": "alter type place add attribute town text",
    "a wider type": "alter table t alter n type numeric(7,2)",
    "a column renamed": "alter table t rename v to w",
    "a column added with a default": "alter table t add w int default 7",
    "another identity": "alter table t replica identity full",
    "another name": "alter table t rename to u",
    "another schema": "create schema elsewhere; alter table t set schema elsewhere",
    "its schema renamed": "alter schema {schema} rename to {schema}_renamed",
    "in a DO block": "do $$ begin execute 'alter table t drop v'; end $$",
    "in a replica's session": "set session_replication_role = replica; alter table t drop v",
}
COLUMN_LIST = {"a column list": "alter publication {publication} set table t (id, v)"}
"""On a stream of its own: this sets what the publication has."""


def name_of(relation: Relation | None) -> str:
    assert relation is not None
    return relation.table.sql


@pytest.mark.parametrize("changes", [CHANGES, COLUMN_LIST], ids=["of a table", "of the publication"])
@pytest.mark.thorough("the same test, of a table", "of the publication")
def test_each_row_is_read_by_the_relation_of_its_own_time_however_late_it_is_received(dsn, tmp_path, changes):
    """Each change is that of a table and types of its own, in a schema of its own."""
    schemas = {change: f"c{number}" for number, change in enumerate(changes)}
    for schema in schemas.values():
        execute(dsn, f"create schema {schema}")
        execute(f"{dsn} options='-c search_path={schema}'", *SHAPE)
    tables = [f"{schema}.t" for schema in schemas.values()]
    pipeline = Watched(dsn, tmp_path, tuple(tables), flush_interval_s=0.05, event_trigger=True)
    relations = {}
    watched = dict(zip(changes, pipeline.begin_watched(*tables), strict=True))
    for change, schema in schemas.items():
        within, one = f"{dsn} options='-c search_path={schema}'", watched[change]
        first = one.now()
        execute(
            within,
            insert(1),
            changes[change].format(publication=pipeline.pipeline.publication, schema=schema),
        )
        second = one.now()
        name = name_of(second)
        execute(within, insert(2, name), f"alter table {name} add later int default 1, drop s")
        relations[change] = [first, second, one.now()]
        execute(within, insert(3, name), f"alter table {name} add later_still int")
    pipeline.receive()
    for change, one in watched.items():
        expected = [relation.version for relation in relations[change]]
        assert len(set(expected)) == 3, change
        assert one.versions("I") == expected, change
        announced = list(dict.fromkeys(record.catalog for record in one.records()))
        assert announced == [*relations[change], one.now()], change


def test_within_a_transaction_the_rows_before_and_after_are_told_apart(watched, dsn):
    before = watched.now()
    execute(dsn, f"begin; {insert(1)}; alter table t drop v, add v text; {insert(2)}; commit")
    after = watched.now()
    execute(dsn, f"begin; {insert(3)}; alter table t add w int; alter table t drop w; {insert(4)}; commit")
    watched.receive()
    assert watched.versions("I") == [
        before.version,
        after.version,
        after.version,
        watched.now().version,
    ]


def test_rolled_back_ddl_leaves_relation_version_unchanged(watched, dsn):
    before = watched.now()
    execute(dsn, "begin; alter table t drop v; rollback")
    execute(dsn, f"begin; savepoint s; alter table t drop v; rollback to s; {insert(1)}; commit")
    watched.receive()
    assert watched.versions() == [before.version] * 2
    assert watched.now() == before


def test_restarts_between_and_after_changes_read_nothing_by_a_later_catalog(watched, dsn, monkeypatch):
    expected = []
    with monkeypatch.context() as patched:
        # The receiver confirms nothing to the slot, so the server sends everything again and again.
        patched.setattr(Receiver, "_send_status", lambda self: None)
        for key in range(3):
            expected.append(watched.now().version)
            execute(dsn, insert(key), "alter table t drop v, add v text")
            with watched.receiving() as receiver:
                wait_until(lambda: len(watched.versions("I")) == len(expected))
                assert receiver.error is None
    expected.append(watched.now().version)
    execute(dsn, insert(4), "alter table t drop v, add v text")
    for _ in range(2):
        watched.receive()
    assert watched.versions("I") == expected
    assert len(watched.changelog_rows("I")) == 4


def test_a_dropped_table_ends_where_it_was_dropped_and_one_of_its_name_is_another(watched, dsn):
    before = watched.now()
    execute(dsn, insert(1), "drop table t", "create table t(id int primary key)", insert(2))
    watched.receive()
    *first, last = watched.records()
    assert watched.versions("I") == [before.version]
    assert [record.catalog for record in first] == [before] * len(first)
    assert last.catalog is None


def test_leaving_the_publication_and_coming_back_both_have_their_place(watched, dsn):
    execute(dsn, insert(1))
    name = watched.pipeline.publication
    execute(dsn, f"alter publication {name} drop table t", insert(2), f"alter publication {name} add table t")
    execute(dsn, insert(3))
    watched.receive()
    memberships = [record.catalog.membership_oid for record in watched.records()]
    assert len(set(memberships)) == 3
    assert 0 in memberships


def test_ddl_on_a_partition_is_one_of_the_partitioned_table(dsn, tmp_path):
    execute(
        dsn,
        "create table t(id int primary key, v text) partition by range (id)",
        "create table low partition of t for values from (0) to (10)",
        "create table high partition of t for values from (10) to (20)",
    )
    watched = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    watched.begin_watched("public.t")
    relations = [watched.now()]
    for key, change in enumerate(
        [
            "alter table t alter v type text using upper(v)",
            "alter table t add w int default 3",
            "drop table high",
            "create table more partition of t for values from (10) to (20)",
            "alter table t detach partition more",
        ]
    ):
        execute(dsn, insert(key), change)
        relations.append(watched.now())
    watched.receive()
    assert len(dict.fromkeys(relations)) == 5
    # The catalog no longer shows whether partitions that are gone had rows: compare without `had_rows`.
    told = [
        replace(
            record.catalog,
            partitions=tuple(replace(part, had_rows=False) for part in record.catalog.partitions),
        )
        for record in watched.records()
    ]
    assert [relation for relation, _ in groupby(told)] == relations


def test_only_tables_of_the_publication_are_told_of(watched, dsn):
    execute(
        dsn,
        "create table made as select 1 as a",
        "alter table other add v text",
        "create temp table t2(a int)",
        "create index on t(v)",
        "comment on table t is 'x'",
        "drop table other",
    )
    watched.receive()
    assert watched.changelog_rows("R", "M") == []


def test_a_publication_of_all_tables_tells_of_new_ones(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key)", "create publication everything for all tables")
    watched = Watched(
        dsn,
        tmp_path,
        ("public.*",),
        flush_interval_s=0.05,
        event_trigger=True,
        publication="everything",
        publication_mode="use",
    )
    watched.begin_watched("public.t")
    execute(
        dsn, "create table made as select 1 as a", "select 2 as b into selected", "create temp table x(a int)"
    )
    watched.receive()
    names = [
        RelationRecord.from_json(row["new"][0]).catalog.table.name for row in watched.changelog_rows("R")
    ]
    assert sorted(set(names)) == ["made", "selected"]


def test_ddl_of_a_role_without_rights_is_told_of_as_well(watched, dsn):
    before = watched.now()
    with weak_role(watched) as role:
        execute(dsn, f"alter table t owner to {role}")
        execute(dsn, insert(1), f"set role {role}; alter table t drop v, add v text")
        execute(dsn, insert(2))
        watched.receive()
    first, second = watched.versions("I")
    assert first == before.version
    assert second == watched.now().version


def test_ddl_goes_on_when_the_function_fails_and_the_catalog_is_read_instead(watched, dsn):
    execute(dsn, insert(1))
    with weak_role(watched) as role:
        execute(dsn, f"alter function {function(watched)} owner to {role}")
        execute(dsn, "revoke select on pg_catalog.pg_inherits from public")
        execute(dsn, "alter table t drop v, add v text", insert(2))
        watched.receive()
        assert watched.versions("I")[1] == watched.now().version
        assert [row["new"][0] for row in watched.changelog_rows("M")] == ["pgrepl.ddl"]
        execute(dsn, "revoke execute on all functions in schema pg_catalog from public")
        execute(dsn, "alter table t drop v, add v text", insert(3))
        watched.receive()
        assert watched.versions("I")[2] == watched.now().version
    assert read_messages(watched.pipeline).num_rows == 0


@pytest.mark.parametrize(
    "unseen",
    [
        "alter event trigger {0} disable; {1}; alter event trigger {0} enable always",
        "drop event trigger {0}; {1}",
    ],
)
@pytest.mark.thorough(
    "the same test, of a trigger that is dropped",
    "alter event trigger {0} disable; {1}; alter event trigger {0} enable always",
)
def test_ddl_that_no_trigger_saw_is_noticed_by_the_catalog(watched, dsn, unseen):
    before = watched.now()
    execute(dsn, insert(1))
    watched.receive()
    name = trigger_names(watched.pipeline.name)[0]
    execute(dsn, unseen.format(name, "alter table t drop v, add v text"), insert(2))
    watched.receive()
    assert watched.now() != before
    assert watched.versions("I") == [before.version, watched.now().version]


def test_vacuum_full_is_no_ddl_and_read_from_the_catalog(watched, dsn):
    execute(dsn, insert(1), "vacuum full t", insert(2))
    watched.receive()
    assert watched.versions("I")[-1] == watched.now().version


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("alter table t drop v, add v text", "dropped and added again"),
        ("alter table t alter id type bigint using id * 10", "USING"),
        ("alter type mood rename value 'sad' to 'blue'", "label"),
    ],
)
@pytest.mark.thorough(
    "the same test, of a column that is dropped and added again",
    "alter table t alter id type bigint using id * 10-USING",
    "alter type mood rename value 'sad' to 'blue'-label",
)
def test_a_table_stops_right_there_with_the_rows_before_in_the_lake(dsn, tmp_path, change, reason):
    execute(dsn, "create type mood as enum ('sad')", "create table t(id int primary key, v text, m mood)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, "insert into t values (0, 'z', null)")
    handed.stream(relation)
    execute(dsn, "insert into t values (1, 'a', 'sad')", "insert into t values (2, 'b', null)", change)
    execute(dsn, "insert into t (id, v) values (3, 'c')")
    result = handed.stream(relation)
    assert reason in result.error
    # The change itself is where the table stops, before the next row.
    *_, second, third = handed.changelog_rows("I")
    assert second["commit_lsn"] < result.error_lsn < third["commit_lsn"]
    assert sorted(handed.lake_rows("public.t")["id"].to_pylist()) == [0, 1, 2]


def test_a_safe_change_that_no_row_follows_is_already_followed(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, insert(1), "alter table t add w int default 7")
    result = handed.stream(relation)
    assert result.error is None
    assert pa.table(handed.lake_rows("public.t")).select(["id", "w"]).to_pylist() == [{"id": 1, "w": 7}]


@pytest.mark.thorough("test_a_safe_change_that_no_row_follows_is_already_followed")
def test_safe_changes_that_no_row_follows_are_followed_once(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v text)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    for change in ("add w int default 7", "drop v", "add x int", "add y int"):
        execute(dsn, f"alter table t {change}")
        assert handed.stream(relation).error is None
    execute(dsn, "insert into t values (1, 2, 3, 4)")
    assert handed.stream(relation).error is None
    assert pa.table(handed.lake_rows("public.t")).select(["id", "w", "x", "y"]).to_pylist() == [
        {"id": 1, "w": 2, "x": 3, "y": 4}
    ]


@pytest.mark.thorough(
    "test_a_safe_change_that_no_row_follows_is_already_followed; test_evolution: amid a transaction"
)
def test_a_transaction_that_ends_with_a_safe_change_is_followed(dsn, tmp_path):
    execute(dsn, "create table t(id int primary key, v text)")
    handed = Handed(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    with handed.source() as source:
        trigger.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, "begin; insert into t values (1, 'a'); alter table t add w int default 7; commit")
    assert handed.stream(relation).error is None
    execute(dsn, "alter table t add x int", "insert into t values (2, 'b', 3, 4)")
    forget(handed.lake_path("public.t"))
    assert handed.stream(relation).error is None
    rows = pa.table(handed.lake_rows("public.t")).select(["id", "w", "x"]).to_pylist()
    assert sorted(rows, key=lambda row: row["id"]) == [
        {"id": 1, "w": 7, "x": None},
        {"id": 2, "w": 3, "x": 4},
    ]


COSTLY = {
    "an unpublished table is created": "create table new (id int primary key, v text)",
    "a published table is altered": "alter table t add later int",
    "a published type is altered": "alter type mood add value 'mixed'",
    "a table leaves the publication": "alter publication {0} drop table t",
}


_ROWS_READ = """
select sum(pg_stat_get_xact_tuples_returned(one) + pg_stat_get_xact_tuples_fetched(one))::int
from unnest(array['pg_attribute', 'pg_class', 'pg_depend', 'pg_index', 'pg_inherits', 'pg_type']::regclass[])
    one
"""


def catalog_rows_read(dsn: str, ddl: str) -> int:
    """Return the number of catalog rows that a DDL reads in a session that has its plans."""
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        found = []
        for _ in range(2):
            cursor.execute("begin")
            cursor.execute(_ROWS_READ)
            found = [cursor.fetchone()[0]]
            cursor.execute(ddl)
            cursor.execute(_ROWS_READ)
            found.append(cursor.fetchone()[0])
            cursor.execute("rollback")
    return int(found[1] - found[0])


def test_ddl_costs_no_more_where_there_are_more_tables(watched, dsn):
    publication = watched.pipeline.publication
    few = {what: catalog_rows_read(dsn, ddl.format(publication)) for what, ddl in COSTLY.items()}
    execute(
        dsn,
        *(f"alter event trigger {name} disable" for name in trigger_names(watched.pipeline.name)),
        "create table parted (id int primary key, v text) partition by range (id)",
        "do $$ begin for i in 1..400 loop execute format('create table many_%s partition of parted"
        " for values from (%s) to (%s)', i, i, i + 1); end loop; end $$",
        *(f"alter event trigger {name} enable always" for name in trigger_names(watched.pipeline.name)),
        "analyze",
    )
    many = {what: catalog_rows_read(dsn, ddl.format(publication)) for what, ddl in COSTLY.items()}
    for what, read in many.items():
        assert read < few[what] + 200, (what, few[what], read)
