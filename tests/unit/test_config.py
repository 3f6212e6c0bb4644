"""settings/pipeline.py: the pipeline file, both ways, and every bad value named."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.support import settings_page

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "pipeline.md"
LEAST: dict[str, Any] = {"name": "shop", "lake": "/data/lake", "tables": ["public.orders"]}
FULL: dict[str, Any] = LEAST | {
    "tables": ["public.orders", "sales.*", '"My Schema"."a.b"'],
    "insert_only": ["sales.log"],
    "conn_id": "source",
    "state_conn_id": "state",
    "lake": "s3://bucket/lake",
    "lake_conn_id": "aws",
    "slot": "mine",
    "publication": "Mine",
    "publication_mode": "use",
    "timestamp_without_tz": "string",
    "commit_lsn_column": False,
    "flush_interval_s": 0.25,
    "trigger_interval_s": 0,
    "batch_bytes": 1,
}


def made(**fields: Any) -> Pipeline:
    return Pipeline.from_dict(LEAST | fields)


@pytest.mark.parametrize("fields", [LEAST, FULL], ids=["least", "full"])
def test_a_pipeline_survives_its_json(fields: dict[str, Any]) -> None:
    pipeline = Pipeline.from_json(json.dumps(fields))
    assert Pipeline.from_json(pipeline.to_json()) == pipeline
    for name, value in fields.items():
        assert getattr(pipeline, name) == (tuple(value) if isinstance(value, list) else value)


def test_slot_and_publication_are_named_after_the_pipeline() -> None:
    assert (made().slot, made().publication) == ("pgrepl_shop", "pgrepl_shop")
    longest = made(name="x" * 55)
    assert len(longest.slot) == 62


def test_a_pipeline_does_not_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        made().name = "other"


def test_missing_pipeline_file_is_named_with_the_folder_it_is_looked_for_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"^cannot read the pipeline file shop.json: No such file"
    ) as raised:
        Pipeline.read("shop.json")
    assert str(tmp_path) in raised.value.hint
    with pytest.raises(ConfigError) as raised:
        Pipeline.read(tmp_path / "shop.json")
    assert raised.value.hint == ""


@pytest.mark.parametrize("lake", ["lake", "./lake", "../lake"])
def test_lake_at_a_relative_path_is_refused(lake: str) -> None:
    """A task of Airflow and a command line would mean another folder each."""
    with pytest.raises(ConfigError, match=rf"^lake: '{re.escape(lake)}' is a relative path"):
        made(lake=lake)


def test_unknown_home_directory_in_lake_fails_only_when_lake_root_is_read() -> None:
    pipeline = made(lake="~of-nobody-here/lake")
    unknown = r"^lake: this host does not know the home directory at the start of '~of-nobody-here/lake'"
    with pytest.raises(ConfigError, match=unknown):
        _ = pipeline.lake_root


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON that"),
        ('{"tables": ["public.orders",]}', "is not JSON that can be read: .*line 1 column 2"),
        ('{"types": ' + "[" * 200_000, "is not JSON that can be read"),
        ('{"flush_bytes": ' + "1" * 5000 + "}", "is not JSON that can be read"),
        ("[]", "one JSON object"),
        ("null", "one JSON object"),
        (
            "{}",
            "there are 3 mistakes:\n  name: is missing; .*\n  tables: is missing; .*\n  lake: is missing",
        ),
        (
            json.dumps(LEAST | {"tabels": [], "slott": 1}),
            "tabels: unknown key; did you mean 'tables'.*\n  slott: unknown key; did you mean",
        ),
    ],
)
def test_a_file_that_is_no_pipeline_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        Pipeline.from_json(text)
    if "JSON that" in says:
        assert "comma before ] or }" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "Shop"),
        ("name", "a-b"),
        ("name", "x" * 56),
        ("name", 7),
        ("lake", " "),
        ("lake", None),
        ("lake", "s3a://key:secret@bucket/lake"),
        ("lake", "/"),
        ("lake", "//"),
        ("lake", "/srv/.."),
        ("lake", "/srv/{{ params.lake }}"),
        ("lake", "s3://bucket"),
        ("lake", "s3://bucket/"),
        ("lake", "s3://Bucket_/lake"),
        ("lake", "s3:///lake"),
        ("lake", "s3://bucket//lake"),
        ("lake", "s3://bucket/../lake"),
        ("lake", "s3://bucket/lake?versionId=1"),
        ("lake", "hdfs://name/lake"),
        ("lake_conn_id", "aws"),
        ("lake", "abfss://box@account.dfs.fabric.microsoft.com/x"),
        ("lake", "file:///srv/lake"),
        ("lake", "file:/srv/lake"),
        ("lake", "s3a:bucket"),
        ("lake", " s3a://bucket"),
        ("lake", "/srv/\0"),
        ("lake", "/srv/\ud800"),
        ("publication", "\ud800"),
        ("tables", ["public.\0"]),
        ("tables", ["public.\ud800"]),
        ("conn_id", "x\ud800"),
        ("message_prefixes", ["audit", "x\0"]),
        ("exclude_columns", ["public.t.x\ud800"]),
        ("types", {"public.t.x\0": "string"}),
        ("tables", []),
        ("tables", "public.orders"),
        ("tables", ["orders"]),
        ("tables", ["a.b.c"]),
        ("tables", [7]),
        ("tables", ["*"]),
        ("tables", ["*.*"]),
        ("tables", ["public.ord*"]),
        ("insert_only", ["sales.*"]),
        ("insert_only", ["sales.*x.y"]),
        ("insert_only", None),
        ("slot", "Mine"),
        ("slot", "x" * 64),
        ("publication", "ü" * 32),
        ("publication_mode", "alter"),
        ("publication_mode", ["use"]),
        ("timestamp_without_tz", "utc"),
        ("state_conn_id", 1),
        ("commit_lsn_column", 1),
        ("commit_ts_column", "yes"),
        ("flush_interval_s", 0),
        ("flush_interval_s", float("nan")),
        ("flush_interval_s", float("inf")),
        ("flush_interval_s", True),
        ("trigger_interval_s", -1),
        ("batch_bytes", 1.5),
        ("batch_bytes", 0),
        ("part_bytes", "32MiB"),
        ("consistent_point_retention_h", 169.0),
        ("changelog_retention_h", 1e9),
        ("consistent_point_bytes", 1e300),
        ("batch_bytes", 10**400),
        ("batch_bytes", -(10**400)),
        ("flush_interval_s", -(10**400)),
        ("reconnect_s", 1e10),
    ],
)
def test_a_bad_value_is_refused_with_its_name(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}(\[\d\]|\[\"[^\"]*\"\])?: ") as caught:
        made(**{field: value})
    assert "secret" not in str(caught.value)


def test_a_pattern_takes_a_whole_schema() -> None:
    assert made(tables=["sales.*"]).tables == ("sales.*",)
    assert made(tables=['"Sales *".*', 'a."*"']).tables == ('"Sales *".*', 'a."*"')


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            Pipeline.read(path)
    (tmp_path / "latin.json").write_bytes(b'{"name": "\xe4"}')
    with pytest.raises(ConfigError, match=r"latin\.json"):
        Pipeline.read(tmp_path / "latin.json")
    (tmp_path / "cut.json").write_text("{")
    with pytest.raises(ConfigError, match=r"cut\.json: the pipeline file is not JSON"):
        Pipeline.read(tmp_path / "cut.json")
    (tmp_path / "good.json").write_text(json.dumps(LEAST))
    assert Pipeline.read(tmp_path / "good.json") == made()


def test_the_lake_root_is_absolute_and_has_no_slash_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert made(lake="/srv/lake/").lake_root == "/srv/lake"
    assert made(lake="~/lake").lake_root == "/home/me/lake"
    assert made(lake="s3a://bucket/a/lake/").lake_root == "s3://bucket/a/lake"


@pytest.mark.parametrize("page", settings_page.PAGES, ids=lambda page: page.name)
def test_tables_of_settings_in_the_reference_are_those_of_the_settings(page: Path) -> None:
    assert page.read_text(encoding="utf-8") == settings_page.text(page), (
        "python -m tests.support.settings_page"
    )


def test_the_example_of_the_reference_is_a_pipeline() -> None:
    (example,) = re.findall(r"```json\n(.*?)```", REFERENCE.read_text(encoding="utf-8"), re.DOTALL)
    assert Pipeline.from_json(example).name == "shop"


def test_a_key_that_looks_like_none_is_told_of_all() -> None:
    with pytest.raises(ConfigError, match="unknown key") as caught:
        Pipeline.from_json('{"name": "shop", "lake": "/l", "tables": ["a.b"], "zzzz": 1}')
    assert "known keys: " in caught.value.hint
    assert "insert_only" in caught.value.hint
