"""settings/tables.py, and what settings/pipeline.py says of choices: each slip is named, with its column."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import LakeType
from airflow_provider_pgrepl.replication.values import option_problems
from tests.support.changes import column, relation

LEAST: dict[str, Any] = {"name": "shop", "lake": "/data/lake", "tables": ["public.*"]}


def made(**fields: Any) -> Pipeline:
    return Pipeline.from_json(json.dumps(LEAST | fields))


@pytest.mark.parametrize("text", ["string", "decimal(38,10)", "array(2)"])
def test_a_lake_type_is_shown_as_it_was_written(text: str) -> None:
    assert str(LakeType.parse(text)) == text


def test_a_blank_after_the_comma_says_nothing() -> None:
    assert LakeType.parse("decimal(10, 2)") == LakeType.parse("decimal(10,2)")


@pytest.mark.parametrize("given", ["strng", "decimal(39,2)", "decimal(2,3)", "array(7)", 5, None, ["string"]])
def test_a_lake_type_that_there_is_not_is_refused_with_its_column(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^types\[\"public\.t\.c\"\]: ") as caught:
        made(types={"public.t.c": given})
    assert "types.md" in caught.value.hint


@pytest.mark.parametrize("given", ["decimal", "double", "array(2)", "decimal(40,2)"])
def test_numeric_without_precision_becomes_a_string_or_a_decimal(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^unconstrained_numeric: .* must be string or decimal\(p,s\)"):
        made(unconstrained_numeric=given)


@pytest.mark.parametrize(
    ("field", "given"),
    [
        ("types", {"public.t.c": "string", 'public."t".c': "decimal(5,2)"}),
        ("per_column", {"public.t.c": {"infinity": "null"}, '"public".t.c': {}}),
        ("per_table", {"public.t": {"history": True}, '"public".t': {"history": False}}),
    ],
)
def test_one_name_in_two_spellings_is_refused(field: str, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: .* are the same"):
        made(**{field: given})


def test_a_key_that_stands_twice_in_the_file_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has key 'public\.t' twice"):
        Pipeline.from_json(
            '{"name": "p", "lake": "/l", "tables": ["public.t"],'
            ' "per_table": {"public.t": {"deletes": "soft"}, "public.t": {"history": true}}}'
        )


def test_all_columns_with_a_type_that_does_not_fit_are_named_with_the_way_out() -> None:
    table = relation(column("id", "bigint", key=True), column("a", "integer"), column("b"), column("c"))
    pipeline = made(
        types={"public.t.a": "decimal(10,2)", "public.t.b": "array(2)", "public.t.c": "string"},
    )
    first, second = option_problems(table, pipeline.options(table.table))
    assert first.startswith("types: column a of type integer cannot be decimal(10,2), only numeric and money")
    assert "use string" in first
    assert second.startswith("types: column b of type text cannot be array(2), only arrays can; leave")


def test_a_table_of_which_nothing_is_left_is_refused() -> None:
    table = relation(column("a"), column("b"), identity="f")
    pipeline = made(exclude_columns=["public.t.a", "public.t.b"])
    (problem,) = option_problems(table, pipeline.options(table.table))
    assert "leaves it no column" in problem


@pytest.mark.parametrize(
    "chosen", [{"types": {"public.t.id": "decimal(38,10)"}}, {"unconstrained_numeric": "decimal(38,10)"}]
)
@pytest.mark.parametrize("policy", [{"deletes": "soft"}, {"truncate": "ignore"}])
def test_a_key_whose_texts_are_one_value_in_the_lake_is_refused_where_rows_that_went_stay(
    chosen: dict[str, Any], policy: dict[str, str]
) -> None:
    of = relation(column("id", "numeric", key=True), column("v"))
    settings: dict[str, Any] = {"name": "p", "lake": "/lake", "tables": ("public.t",)}
    (problem,) = option_problems(of, Pipeline(**settings, **chosen, **policy).options(of.table))
    assert "column id of its key" in problem
    assert not list(option_problems(of, Pipeline(**settings, **policy).options(of.table)))
    assert not list(option_problems(of, Pipeline(**settings, **chosen).options(of.table)))
    exact = relation(column("id", "numeric(12,2)", key=True), column("v", "numeric"))
    assert not list(
        option_problems(
            exact, Pipeline(**settings, **policy, unconstrained_numeric="decimal(38,9)").options(exact.table)
        )
    )
