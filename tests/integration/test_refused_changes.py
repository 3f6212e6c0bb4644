"""Reports of refused changes agree with what the server does to the application's UPDATE and DELETE."""

from __future__ import annotations

import psycopg2
import pytest

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.app.drift_check.check import check_drift
from airflow_provider_pgrepl.replication.app.drift_check.migration import check_migration
from airflow_provider_pgrepl.replication.app.source_problems import SourceProtection
from airflow_provider_pgrepl.replication.app.status.status import read_status
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.refused_changes import read_refused
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.preflight.selection import resolve_tables
from airflow_provider_pgrepl.replication.state.tables import TableState
from tests.support.recorded import Recorded

STORED = "g int generated always as (id + 1) stored"
VIRTUAL = "g int generated always as (id + 1) virtual"
ALL = "create publication p for table t"
SENT = f"{ALL} with (publish_generated_columns = stored)"
FULL = "alter table t replica identity full"
KEYED = "create table t (id int primary key, v text{})"
SHAPES: dict[str, tuple[int, tuple[str, ...]]] = {
    "a key": (14, (KEYED.format(""), ALL)),
    "no key": (14, ("create table t (id int, v text)", ALL)),
    "nothing": (14, (KEYED.format(""), "alter table t replica identity nothing", ALL)),
    "full": (14, ("create table t (id int, v text)", FULL, ALL)),
    "a deferrable key": (14, ("create table t (id int primary key deferrable, v text)", ALL)),
    "an index that is gone": (
        14,
        (
            "create table t (id int not null, v text)",
            "create unique index i on t (id)",
            "alter table t replica identity using index i",
            ALL,
            "drop index i",
        ),
    ),
    "inserts only": (14, ("create table t (id int, v text)", f"{ALL} with (publish = 'insert')")),
    "full with a stored column": (14, (KEYED.format(f", {STORED}"), FULL, ALL)),
    "full with a stored column that is sent": (18, (KEYED.format(f", {STORED}"), FULL, SENT)),
    "full with a virtual column": (18, (KEYED.format(f", {VIRTUAL}"), FULL, SENT)),
    "a key and a virtual column": (18, (KEYED.format(f", {VIRTUAL}"), SENT)),
    "an index over a stored column": (
        14,
        (
            f"create table t (id int, v text, {STORED})",
            "alter table t alter g set not null",
            "create unique index i on t (g)",
            "alter table t replica identity using index i",
            ALL,
        ),
    ),
    "a column list": (15, (KEYED.format(""), "create publication p for table t (id)")),
    "a column list without the key": (15, (KEYED.format(""), "create publication p for table t (v)")),
    "a column list and full": (15, (KEYED.format(""), FULL, "create publication p for table t (id, v)")),
    "a row filter over the key": (15, (KEYED.format(""), f"{ALL} where (id > 0)")),
    "a row filter over others": (15, (KEYED.format(""), f"{ALL} where (v <> 'x')")),
    "a row filter and full": (15, (KEYED.format(""), FULL, f"{ALL} where (v <> 'x')")),
    "all tables": (14, ("create table t (id int, v text)", "create publication p for all tables")),
    "a partition without identity": (
        14,
        (
            "create table t (id int, v text) partition by range (id)",
            FULL,
            "create table t_1 partition of t for values from (0) to (10)",
            f"{ALL} with (publish_via_partition_root)",
        ),
    ),
}


def pipeline(*tables: str) -> Pipeline:
    return Pipeline(name="shop", lake="/nowhere", tables=tables)


def refuses(pg: psycopg2.extensions.connection) -> bool:
    try:
        pg.cursor().execute("update t set id = id")
    except (psycopg2.errors.InvalidColumnReference, psycopg2.errors.ObjectNotInPrerequisiteState):
        return True
    return False


@pytest.mark.differs_by_major(
    "what of a publication makes the server refuse changes: lists and filters from 15"
    " on, generated columns from 18 on",
    since=(15, 18),
)
@pytest.mark.parametrize("shape", SHAPES)
def test_changes_are_said_to_be_refused_exactly_where_the_server_refuses_them(pg, run, shape):
    since, statements = SHAPES[shape]
    if pg.info.server_version < since * 10000:
        return  # it has no such thing
    run(*statements, "insert into t values (1, 'x')")
    relation = find_relation(pg, TableName("public", "t"), "p")
    refused = read_refused(pg, [relation], "p")
    assert (relation.oid in refused) == refuses(pg), refused


@pytest.mark.differs_by_major("generated columns in replica identities are refused from 18 on", since=(18,))
def test_cure_ends_the_refusal(pg, run):
    run(KEYED.format(f", {STORED}"), FULL, ALL, "insert into t values (1, 'x')")
    relation = find_relation(pg, TableName("public", "t"), "p")
    for refused in read_refused(pg, [relation], "p").values():
        assert refuses(pg)
        run(refused.cure.split(";")[0])
    assert not refuses(pg)


@pytest.mark.differs_by_major("column lists are there from 15 on", since=(15,))
def test_cure_of_a_column_list_keeps_the_other_tables_in_the_publication(pg, run):
    if pg.info.server_version < 150000:
        return
    run(KEYED.format(""), "create table other (id int primary key)", FULL)
    run("create publication p for table t (id), other", "insert into t values (1, 'x')")
    relation = find_relation(pg, TableName("public", "t"), "p")
    (refused,) = read_refused(pg, [relation], "p").values()
    assert refused.fix == ""
    leave, add, _ = refused.cure.split("; ", 2)
    run(leave)
    assert not refuses(pg)
    run(add.split(" (…)")[0])
    assert not refuses(pg)
    with pg.cursor() as cursor:
        cursor.execute("select tablename from pg_publication_tables where pubname = 'p' order by 1")
        assert cursor.fetchall() == [("other",), ("t",)]


VIRTUAL_SINCE_18 = "virtual generated columns are there from 18 on"


@pytest.mark.differs_by_major(VIRTUAL_SINCE_18, since=(18,))
def test_table_whose_changes_would_be_refused_is_not_published(pg, run, caplog):
    if pg.info.server_version < 180000:
        return
    run(KEYED.format(f", {VIRTUAL}"), FULL, "create table other (id int primary key)")
    (taken,) = resolve_tables(pg, pipeline("public.*"))
    assert str(taken.table) == "public.other"
    refused = (
        "the source refuses UPDATE and DELETE on it, because its replica identity is FULL and so holds the"
    )
    assert f"the pattern leaves out public.t: while it is published, {refused}" in caplog.text
    with pytest.raises(TableError, match=refused) as caught:
        resolve_tables(pg, pipeline("public.t"))
    assert 'Either ALTER TABLE "public"."t" REPLICA IDENTITY DEFAULT' in caught.value.message


BREAKS = {
    "virtual column": (18, f"alter table t add {VIRTUAL}; alter table t replica identity full"),
    "key": (14, "alter table t drop constraint t_pkey"),
    "identity": (14, "alter table t replica identity nothing"),
}


@pytest.mark.differs_by_major(VIRTUAL_SINCE_18, since=(18,))
@pytest.mark.parametrize("name", BREAKS)
def test_migration_that_makes_the_source_refuse_changes_is_unsafe(pg, dsn, run, name):
    since, migration = BREAKS[name]
    if pg.info.server_version < since * 10000:
        return
    run(KEYED.format(""), "create table other (id int primary key)")
    report = check_migration(dsn, pipeline("public.*"), migration)
    assert report.is_unsafe
    (problem,) = report.problems
    assert problem.startswith("public.t: while it is published, the source refuses UPDATE and DELETE on it")
    assert check_migration(dsn, pipeline("public.*"), "alter table t add later int").problems == ()


def test_refused_changes_are_problems_of_drift_check_and_status(dsn, run, tmp_path, monkeypatch):
    run(KEYED.format(""), "create table other (id int primary key)")
    shop = Recorded(dsn, lake=str(tmp_path))
    assert check_drift(shop.access).problems == ()
    run("alter table t drop constraint t_pkey")
    with pytest.raises(psycopg2.errors.ObjectNotInPrerequisiteState):
        run("delete from t")
    report = check_drift(shop.access)
    assert report.is_unsafe
    (problem,) = report.problems
    assert 'ALTER TABLE "public"."t" ADD PRIMARY KEY' in problem
    assert 'ALTER PUBLICATION "pgrepl_shop" DROP TABLE "public"."t"' in problem
    assert "the source refuses UPDATE and DELETE" in shop.record("public.t").reason
    monkeypatch.setenv("PGREPL_DSN", dsn)
    assert problem in read_status(shop.pipeline).problems


def test_tables_that_join_a_publication_without_identity_are_named(dsn, run, tmp_path):
    """A publication of all tables takes in those that the pipeline does not replicate."""
    run(KEYED.format(""), "create publication theirs for all tables with (publish_via_partition_root)")
    shop = Recorded(dsn, "public.t", lake=str(tmp_path), publication="theirs", publication_mode="use")
    assert check_drift(shop.access).problems == ()
    (problem,) = check_migration(dsn, shop.pipeline, "create table joined (id int)").problems
    assert problem.startswith("public.joined: while it is published, the source refuses UPDATE and DELETE")
    run("create table joined (id int)")
    assert check_drift(shop.access).problems == (problem,)


def test_protected_source_gets_its_changes_through_again(dsn, run, tmp_path):
    run(KEYED.format(""), "create table other (id int primary key)")
    shop = Recorded(dsn, lake=str(tmp_path), protect_source=True)
    protection = SourceProtection(dsn, dsn, shop.pipeline)
    protection.look()
    assert shop.record("public.t").state is TableState.STREAMING
    run("alter table t drop constraint t_pkey")
    protection.look()
    run("update t set id = id", "delete from t")
    record = shop.record("public.t")
    assert record.state is TableState.ERRORED
    assert record.reason.startswith("public.t: taken out of the publication: while it is published")
    assert shop.record("public.other").state is TableState.STREAMING
    protection.look()
    assert check_drift(shop.access).problems == ()
    protection.start()
    protection.stop()


def test_table_of_inserts_without_identity_is_no_problem(dsn, run, tmp_path):
    run("create table t (id int)", "create table other (id int primary key)")
    shop = Recorded(dsn, lake=str(tmp_path), insert_only=("public.t",), protect_source=True)
    assert check_drift(shop.access).problems == ()
    assert shop.record("public.t").state is TableState.STREAMING
