"""The information about this provider that Airflow reads."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import airflow
import jsonschema
import pytest
import yaml

import airflow_provider_pgrepl
from airflow_provider_pgrepl import get_provider_info

PACKAGE = Path(airflow_provider_pgrepl.__file__).parent
YAML_SCHEMA = Path(airflow.__file__).parent / "provider.yaml.schema.json"
SCHEMA = Path(airflow.__file__).parent / "provider_info.schema.json"


def info() -> Any:
    return get_provider_info()


def test_provider_info_is_valid_for_airflow() -> None:
    jsonschema.validate(info(), json.loads(SCHEMA.read_text(encoding="utf-8")))


def test_provider_yaml_is_valid_for_airflow_and_names_the_version() -> None:
    declared = yaml.safe_load((PACKAGE / "provider.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(declared, json.loads(YAML_SCHEMA.read_text(encoding="utf-8")))
    assert declared["versions"][0] == airflow_provider_pgrepl.__version__


@pytest.mark.parametrize("kind", ["operators", "sensors", "triggers"])
def test_provider_yaml_names_every_module_with_public_class(kind: str) -> None:
    has_public_class = re.compile(r"^class (Pg\w+|\w+Trigger)\(", re.MULTILINE)
    modules = {
        ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        for file in [*(PACKAGE / kind).glob("*.py"), *PACKAGE.glob(f"{kind}.py")]
        if has_public_class.search(file.read_text(encoding="utf-8"))
    }
    assert modules == {module for group in info()[kind] for module in group["python-modules"]}


def test_every_named_module_and_hook_can_be_imported() -> None:
    for kind in ("hooks", "operators", "sensors", "triggers"):
        for group in info()[kind]:
            for module in group["python-modules"]:
                importlib.import_module(module)
    for link in info()["extra-links"]:
        module, _, name = link.rpartition(".")
        assert getattr(importlib.import_module(module), name).name
    [connection_type] = info()["connection-types"]
    module, _, name = connection_type["hook-class-name"].rpartition(".")
    hook = getattr(importlib.import_module(module), name)
    assert hook.conn_type == connection_type["connection-type"]
    assert hook.hook_name == connection_type["hook-name"]


def test_every_field_of_the_connection_form_reaches_libpq() -> None:
    from airflow_provider_pgrepl.hooks.replication import LIBPQ_EXTRAS

    [connection_type] = info()["connection-types"]
    assert set(connection_type["conn-fields"]) <= set(LIBPQ_EXTRAS)
    for field in connection_type["conn-fields"].values():
        jsonschema.Draft202012Validator.check_schema(field["schema"])


def test_no_choice_of_the_connection_form_is_shown_as_null() -> None:
    [connection_type] = info()["connection-types"]
    choices = [
        field["schema"] for field in connection_type["conn-fields"].values() if "enum" in field["schema"]
    ]
    assert choices
    for schema in choices:
        assert None not in schema["enum"]
        assert schema["default"] in schema["enum"], (
            "or the form begins with an empty choice, which it calls null"
        )


def test_airflow_finds_the_provider_by_its_entry_point() -> None:
    from airflow.sdk.providers_manager_runtime import ProvidersManagerTaskRuntime

    hook = ProvidersManagerTaskRuntime().hooks["pgrepl"]
    assert hook is not None
    assert hook.connection_type == "pgrepl"


def test_the_package_itself_imports_without_airflow() -> None:
    program = (
        "import sys, airflow_provider_pgrepl as p; p.get_provider_info(); print('airflow' in sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "False"
