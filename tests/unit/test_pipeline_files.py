"""Pipeline files, JSON and YAML: every mistake is named with its path, and the JSON Schema agrees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from airflow_provider_pgrepl.__main__ import main
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.settings.mistakes import is_of
from airflow_provider_pgrepl.replication.settings.pipeline import PIPELINE_FIELDS, Pipeline, read_yaml
from airflow_provider_pgrepl.replication.settings.publisher_sections import PUBLISHER_FIELDS
from airflow_provider_pgrepl.replication.settings.schema import descriptions, pipeline_schema
from tests.support.pipeline_files import FILES

LEAST: dict[str, Any] = {"name": "shop", "lake": "/data/lake", "tables": ["public.orders"]}
SCHEMA = Draft202012Validator(pipeline_schema())


class Other:
    """A value of no setting's type."""


def refusal(fields: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_dict(fields)
    return str(caught.value)


def test_all_mistakes_of_a_file_are_told_at_once_each_with_its_path_and_what_was_meant() -> None:
    publishers = {
        "orders": {"target": "kafka", "hash_columns": ["a.b.c", "a.b.d", "e"], "outbox": {"tabel": "a.b"}},
        "log": {"target": "rabbit", "metrics": "9187"},
        "other": {"target": "nats", "database": "d", "exchange": "e", "unchanged": "fil"},
    }
    per_table = {"public.orders": {"delets": "soft", "merge_interval_s": -1}}
    said = refusal(
        {"name": "Shop", "lake": "lake", "tabels": [], "per_table": per_table, "publishers": publishers}
        | {"consistent_point_retention_h": 2, "changelog_retention_h": 1}
    ).splitlines()
    for line in (
        "  name: 'Shop' may hold only a-z, 0-9 and _",
        "  lake: 'lake' is a relative path",
        "  tabels: unknown key; did you mean 'tables'?",
        "  tables: is missing",
        """  per_table["public.orders"].delets: unknown key; did you mean 'deletes'?""",
        """  per_table["public.orders"].merge_interval_s: -1 must not be negative""",
        "  publishers.orders.hash_columns[2]: 'e' is not a column's full name",
        "  publishers.orders.outbox.tabel: unknown key; did you mean 'table'?",
        "  publishers.log.target: 'rabbit' must be one of 'rabbitmq', 'nats', 'kafka'; did you mean 'rabbit",
        "  publishers.log.metrics: '9187' is no address",
        "  publishers.other.unchanged: 'fil' must be one of",
        "  publishers.other.exchange: is of target 'rabbitmq' alone",
        "  consistent_point_retention_h: must not be longer than changelog_retention_h",
    ):
        assert any(one.startswith(line) for one in said), line
    assert said[0] == f"there are {len(said) - 1} mistakes:"


def test_checks_of_several_settings_say_nothing_of_one_that_has_a_mistake() -> None:
    assert refusal(LEAST | {"consistent_point_retention_h": "x", "changelog_retention_h": 1}).startswith(
        "consistent_point_retention_h: 'x'"
    )


@pytest.mark.parametrize("name", PIPELINE_FIELDS.fields)
def test_wrong_type_of_a_setting_is_told_with_its_name(name: str) -> None:
    said = refusal(LEAST | {name: Other()})
    assert said.startswith(f"{name}: ")
    assert " must be " in said


@pytest.mark.parametrize("name", PUBLISHER_FIELDS.fields)
def test_wrong_type_of_a_publishers_setting_is_told_with_its_path(name: str) -> None:
    said = refusal(LEAST | {"publishers": {"events": {"target": "rabbitmq", name: Other()}}})
    assert f"publishers.events.{name}: " in said


NUMBERS = [name for name, hint in PIPELINE_FIELDS.hints.items() if is_of(1, hint) and not is_of("", hint)]


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, 1e300, float("nan"), True])
def test_number_out_of_range_is_told_with_its_name(name: str, value: float) -> None:
    assert refusal(LEAST | {name: value}).startswith(f"{name}: ")


@given(FILES)
@settings(max_examples=100, deadline=None)
def test_valid_file_fits_the_schema_and_is_the_same_in_json_and_yaml(file: dict[str, Any]) -> None:
    assert [*SCHEMA.iter_errors(file)] == []
    assert [*PIPELINE_FIELDS.mistakes(file)] == []
    try:
        pipeline = Pipeline.from_json(json.dumps(file))
    except ConfigError:
        reject()  # settings that do not go together
    assert Pipeline.from_dict(read_yaml(yaml.safe_dump(file))) == pipeline
    assert Pipeline.from_json(pipeline.to_json()) == pipeline


@given(FILES, st.data())
@settings(max_examples=100, deadline=None)
def test_file_that_does_not_fit_the_schema_is_refused_with_the_path(file: dict[str, Any], data: Any) -> None:
    name = data.draw(st.sampled_from(sorted(file)))
    value = data.draw(st.none() | st.booleans() | st.integers(-9, 0) | st.text(max_size=3) | st.just([1]))
    broken = file | {name: value}
    if any(error.absolute_path and error.absolute_path[0] == name for error in SCHEMA.iter_errors(broken)):
        assert f"{name}" in refusal(broken)


def test_schema_is_one_of_draft_2020_12_in_which_everything_is_described() -> None:
    Draft202012Validator.check_schema(pipeline_schema())
    assert descriptions(PIPELINE_FIELDS).keys() == PIPELINE_FIELDS.fields.keys()
    assert all("](" not in one["description"] for one in described(pipeline_schema()))


def described(schema: Any) -> Iterator[dict[str, Any]]:
    for name, one in schema.get("properties", {}).items():
        if name != "$schema":
            yield one
            yield from described(one)


def test_command_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == pipeline_schema()


def test_key_by_which_an_editor_finds_the_schema_is_ignored() -> None:
    assert Pipeline.from_dict({"$schema": "pipeline.schema.json", **LEAST}) == Pipeline.from_dict(LEAST)


def test_yaml_file_is_read_by_its_ending(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text("# ours\nname: shop\nlake: /data/lake\ntables: [public.orders]\nhistory: true\n")
    assert Pipeline.read(file) == Pipeline.from_dict(LEAST | {"history": True})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: shop\nhistory: no\n", "line 2 column 10: no is text or not"),
        ("name: shop\nconn_id: 2026-01-31\n", "line 2 column 10: 2026-01-31 is text or not"),
        ("name: shop\nflush_bytes: 010\n", "line 2 column 14: 010 is text or not"),
        ("name: shop\nflush_bytes: 1:30\n", "line 2 column 14: 1:30 is text or not"),
        ("name: shop\nname: shop\n", "line 2 column 1: has key 'name' twice"),
        ("types:\n  on: string\n", "line 2 column 3: a key must be a text"),
        ("tables: &all [a.b]\ninsert_only: *all\n", "line 2 column 14: aliases"),
        ("name: [shop\n", "line 2 column 1: expected ',' or ']'"),
        ("name: !!python/object/apply:os.getcwd []\n", "line 1 column 7: could not determine a constructor"),
        ("a: 1\n---\nb: 1\n", "line 2 column 1: but found another document"),
        ("- a\n", "must hold one YAML object"),
        ("", "must hold one YAML object"),
    ],
)
def test_yaml_that_can_be_read_in_two_ways_or_in_none_is_refused_with_its_line(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_yaml(text)
    assert says in caught.value.message
