"""Tables that become unlogged, for a while or for good, in publications that keep them without a word."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.drift.judge import judge_catalog
from airflow_provider_pgrepl.replication.drift.kind import Kind
from airflow_provider_pgrepl.replication.source.catalog.relations import read_relation
from tests.support.altered import Altered, done
from tests.support.replicated import execute

TABLE = (
    "create table t (id int primary key, n int)",
    "insert into t values (1, 1), (2, 2)",
)
ROW = "insert into t values (9, 9)"
PUBLICATIONS = {
    "of all tables": "create publication everything for all tables",
    "of a schema": "create publication everything for tables in schema public",
}
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
UNEXPLAINED = {"VACUUM FULL": "vacuum full t", "a wider type": "alter table t alter n type bigint"}
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


@pytest.fixture(params=PUBLICATIONS.values(), ids=PUBLICATIONS)
def publication(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[False, True], ids=["", "event trigger"])
def taken(request: pytest.FixtureRequest, dsn: str, tmp_path: Path, publication: str) -> Altered:
    execute(dsn, *TABLE, publication)
    options = {"publication": "everything", "publication_mode": "use", "event_trigger": request.param}
    return Altered(dsn, tmp_path, **options).take()


def look(taken: Altered) -> str:
    """What a look at the catalog says."""
    with taken.source() as source:
        assert taken.relation is not None
        current = read_relation(source, taken.relation.oid, taken.pipeline.publication)
    return judge_catalog(taken.relation, current, taken.pipeline.choices(taken.relation.table)).reason


def test_an_unlogged_table_has_stopped(taken, dsn):
    execute(dsn, ROW)
    done(taken.follow())
    execute(dsn, "alter table t set unlogged", "delete from t")
    assert look(taken) == "the table is unlogged: its changes are not in the stream"
    result = taken.follow()
    assert "unlogged" in result.error, "nothing comes of it any more, and yet it is noticed"
    execute(dsn, "alter table t add m int", "alter table t set logged", "insert into t values (10, 10)")
    result = taken.follow()
    assert "unlogged" in result.error
    assert "resnapshot it" in result.hint


@pytest.mark.parametrize("statements", FOR_A_WHILE.values(), ids=FOR_A_WHILE)
def test_a_table_that_was_unlogged_for_a_while_stops(taken, dsn, statements):
    execute(dsn, *statements)
    assert "may have been unlogged meanwhile" in look(taken)
    execute(dsn, ROW)
    assert "unlogged" in taken.follow().error


@pytest.mark.parametrize("statement", UNEXPLAINED.values(), ids=UNEXPLAINED)
def test_only_an_event_trigger_tells_another_rewrite_from_that(taken, dsn, statement):
    execute(dsn, ROW, statement, "insert into t values (10, 10)")
    if taken.pipeline.event_trigger:
        done(taken.follow())
        execute(dsn, "insert into t values (11, 11)", "vacuum full t", "delete from t where id = 2")
        done(taken.follow())
        taken.assert_as_source()
    else:
        assert "may have been unlogged meanwhile" in taken.follow().error


@pytest.mark.parametrize("statements", EXPLAINED.values(), ids=EXPLAINED)
@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_explained_is_followed(taken, dsn, statements, at_once):
    if "set unlogged" in " ".join(statements) and (taken.pipeline.event_trigger or not at_once):
        return  # looked at in between, it is stopped
    for statement in statements:
        execute(dsn, statement)
        if not at_once:
            done(taken.follow())
    execute(dsn, "insert into t values (8, 8)")
    done(taken.follow())
    execute(dsn, ROW)
    done(taken.follow())
    taken.assert_as_source()


def test_a_table_that_is_published_by_name_cannot_become_unlogged_and_may_be_rewritten(dsn, tmp_path):
    execute(dsn, *TABLE)
    taken = Altered(dsn, tmp_path).take()
    execute(dsn, ROW, "vacuum full t", "insert into t values (10, 10)")
    done(taken.follow())
    taken.assert_as_source()


@pytest.mark.parametrize(
    "statements",
    [
        ["alter table whole detach partition t", "delete from t", "attach"],
        ["begin; alter table whole detach partition t; delete from t; attach; commit"],
        ["alter table t set unlogged", "delete from t", "alter table t set logged"],
    ],
    ids=["detached", "detached at once", "unlogged"],
)
def test_a_partition_that_is_published_through_its_table_alone_is_watched_likewise(dsn, tmp_path, statements):
    attach = "alter table whole attach partition t for values from (0) to (100)"
    execute(
        dsn,
        "create table whole (id int primary key, n int) partition by range (id)",
        *TABLE,
        attach,
        "create publication everything for table whole",
    )
    taken = Altered(dsn, tmp_path, publication="everything", publication_mode="use").take()
    execute(dsn, *(statement.replace("attach;", f"{attach};") for statement in statements[:-1]))
    execute(dsn, attach if statements[-1] == "attach" else statements[-1].replace("attach;", f"{attach};"))
    assert judge(taken) is Kind.UNSAFE
    execute(dsn, ROW)
    assert "missing" in taken.follow().error


def judge(taken: Altered) -> Kind:
    with taken.source() as source:
        assert taken.relation is not None
        current = read_relation(source, taken.relation.oid, taken.pipeline.publication)
    return judge_catalog(taken.relation, current, taken.pipeline.choices(taken.relation.table)).kind
