"""settings/targets.py: every broker and format has all its parts, and no other code compares their names."""

from __future__ import annotations

import dataclasses
import importlib
import re
import tomllib
from pathlib import Path
from typing import get_args

import pytest

from airflow_provider_pgrepl.replication.app.event_makers import _MAKERS
from airflow_provider_pgrepl.replication.events.targets import base
from airflow_provider_pgrepl.replication.events.targets.jetstream import JetStream
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS, FormatName, TargetName

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {field.name for field in dataclasses.fields(PublisherSettings)}
PAGE = (ROOT / "docs" / "reference" / "publishers.md").read_text()
COMPARED = re.compile(rf'(?:[!=]=|\bin) \(?"(?:{"|".join((*TARGETS, *FORMATS))})"')


@pytest.mark.parametrize("name", TARGETS)
def test_target_has_its_module_its_extra_and_its_place(name: str) -> None:
    kind = TARGETS[name]  # type: ignore[index]
    module = importlib.import_module(f"airflow_provider_pgrepl.replication.events.targets.{kind.module}")
    assert hasattr(module, kind.title)
    assert hasattr(base, kind.place)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extra = project["optional-dependencies"][name]
    assert any(requirement.startswith(kind.client) for requirement in extra)
    assert set(kind.formats) <= FORMATS.keys()
    assert {*kind.settings, *kind.defaults("shop")} <= FIELDS
    assert f"`{name}`" in PAGE


def test_format_with_snapshots_has_targets_that_serve_them() -> None:
    for kind in TARGETS.values():
        module = importlib.import_module(f"airflow_provider_pgrepl.replication.events.targets.{kind.module}")
        if any(FORMATS[name].has_snapshots for name in kind.formats):
            assert issubclass(getattr(module, kind.title), JetStream)


@pytest.mark.parametrize("name", FORMATS)
def test_format_has_its_maker_and_belongs_to_a_target(name: str) -> None:
    kind = FORMATS[name]  # type: ignore[index]
    assert name in _MAKERS
    assert any(name in target.formats for target in TARGETS.values())
    assert {*kind.settings, *kind.excludes} <= FIELDS
    assert f"`{name}`" in PAGE


def test_names_of_settings_are_those_of_the_registries() -> None:
    assert get_args(TargetName) == tuple(TARGETS)
    assert set(get_args(FormatName)) == FORMATS.keys()


def test_no_code_compares_the_name_of_a_target_or_a_format() -> None:
    package = ROOT / "airflow_provider_pgrepl"
    found = [str(path) for path in package.rglob("*.py") if COMPARED.search(path.read_text())]
    assert found == []
