"""Types that are legal and made of far too much: they concern their own table, and no other."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import MOST_PARTS, TOO_LARGE, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.catalog.types import TypePartBudget, Types
from airflow_provider_pgrepl.replication.source.event_trigger import trigger as event_trigger_of
from airflow_provider_pgrepl.replication.source.preflight.check import check_source
from airflow_provider_pgrepl.replication.values import lake_schema
from tests.support.handed import Handed
from tests.support.replicated import execute

pytestmark = pytest.mark.slow

TABLE = TableName("public", "t")

TYPES = {
    "nested domains": [
        "create domain v0 as int",
        *(f"create domain v{n} as v{n - 1}" for n in range(1, 200)),
        "create domain odd as v199",
    ],
    "nested composites": [
        "create type v0 as (a int)",
        *(f"create type v{n} as (a v{n - 1})" for n in range(1, 1200)),
        "create domain odd as v1199",
    ],
    "composites of two of the one before": [
        "create type v0 as (a int, b int)",
        *(f"create type v{n} as (a v{n - 1}, b v{n - 1})" for n in range(1, 17)),
        "create domain odd as v16",
    ],
    "a range of a range of an array": [
        "create type v0 as range (subtype = int)",
        *(f"create type v{n} as range (subtype = v{n - 1})" for n in range(1, 40)),
        "create domain odd as v39[]",
    ],
    "an enum of very many labels": [
        "do $$ begin execute 'create type odd as enum (' || (select string_agg(quote_literal('l' || g), ',')"
        " from generate_series(1, 100000) g) || ')'; end $$",
    ],
}


def pipeline(**options: object) -> Pipeline:
    tables = ("public.t", "public.u")
    return Pipeline(name="p", lake="/lake", tables=tables, trust_table_owners=True, **options)


MOST_STEPS = 5000
"""A type is looked at once for each of its parts, and not for each of theirs: of those there are 76,500."""


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The types whose parts are looked at, each time."""
    found: list[int] = []
    parts = Types._parts

    def count(self: Types, oid: int) -> list[int]:
        found.append(oid)
        return parts(self, oid)

    monkeypatch.setattr(Types, "_parts", count)
    return found


@pytest.mark.parametrize("statements", TYPES.values(), ids=TYPES)
@pytest.mark.thorough(
    "the same test, of composites, domains and ranges", "nested composites", "an enum of very many labels"
)
def test_a_table_of_such_a_type_is_refused_by_name(pg, dsn, run, steps, statements):
    run(
        *statements,
        "create table t (id int primary key, c odd, d odd[], e text)",
        "create table u (id int primary key)",
    )
    with pytest.raises(TableError) as caught:
        check_source(dsn, pipeline())
    assert len(steps) < MOST_STEPS
    assert "public.t: column c of type public.odd is made of more than" in caught.value.message
    relation = find_relation(pg, TABLE)
    assert [column.pg_type.kind for column in relation.columns] == ["b", TOO_LARGE, TOO_LARGE, "b"]
    assert len(relation.to_json()) < 5000
    assert Relation.from_json(relation.to_json()) == relation
    kept = pipeline(text_columns=("public.t.c",), exclude_columns=("public.t.d",))
    assert [field.type for field in lake_schema(relation, kept.options(relation.table))][1] == "string"
    check_source(dsn, kept)


def test_very_many_columns_of_types_that_are_fine_alone_have_a_limit_together(pg, run, steps):
    run(
        "do $$ begin execute 'create type fine as (' || (select string_agg('f' || g || ' int', ',')"
        " from generate_series(1, 50) g) || ')'; end $$",
        "do $$ begin execute 'create table t (id int primary key,' || (select string_agg("
        "'c' || g || ' fine', ',') from generate_series(1, 1500) g) || ')'; end $$",
    )
    relation = find_relation(pg, TABLE)
    text = relation.to_json()
    assert len(steps) < MOST_STEPS
    kinds = [column.pg_type.kind for column in relation.columns[1:]]
    fit = (MOST_PARTS - 1) // 51
    assert kinds == ["c"] * fit + [TOO_LARGE] * (1500 - fit)
    assert len(text) < 10_000_000


def test_a_type_that_is_its_own_part_has_no_end():
    """No catalog has such a type, but a message could describe one."""
    types = Types({99: ("v", "c", ",", 0, False, 0, -1, 0, "")}, {99: [("a", 99, -1)]})
    types._measure(99)
    assert types.find(99, -1, TypePartBudget()).kind == TOO_LARGE
    assert types.with_rows() == [99]


@pytest.mark.parametrize("event_trigger", [False, True])
@pytest.mark.parametrize("change", ["alter table t add d odd", "alter type small add attribute b odd"])
@pytest.mark.thorough(
    "the same test, of a column that is added, with the event trigger",
    "alter type small add attribute b odd-False",
    "alter type small add attribute b odd-True",
    "alter table t add d odd-False",
)
def test_one_that_comes_while_it_is_replicated_stops_its_table_alone(
    dsn, tmp_path, steps, change, event_trigger
):
    execute(
        dsn,
        *TYPES["composites of two of the one before"],
        "create type small as (a int)",
        "create table t (id int primary key, c small)",
        "create table u (id int primary key)",
        "insert into t values (1, row(1))",
    )
    handed = Handed(dsn, tmp_path, ("public.t", "public.u"), event_trigger=event_trigger)
    if event_trigger:
        with handed.source() as source:
            event_trigger_of.install(source, handed.pipeline)
    relation = handed.copy("public.t")
    execute(dsn, "insert into u values (1)", "insert into t values (2, row(2))", change)
    execute(dsn, "insert into t (id) values (3)", "insert into u values (2)")
    result = handed.stream(relation)
    assert len(steps) < MOST_STEPS
    assert result.error_kind == "DriftError", result
    assert "column" in (result.error or "")
    assert sorted(row["new"][0] for row in handed.changelog_rows("I") if len(row["new"]) == 1) == ["1", "2"]
    assert sorted(handed.lake_rows("public.t")["id"].to_pylist()) in ([1], [1, 2])
