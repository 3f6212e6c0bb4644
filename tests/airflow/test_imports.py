"""What parsing a DAG brings into the process: Airflow's own modules, ours, and a driver of PostgreSQL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl import get_provider_info

ROOT = Path(__file__).parents[2]
HEAVY = ("numba", "pyarrow", "deltalake", "numpy", "pandas", "pyspark")

LOOK = """
import importlib, json, runpy, sys
import airflow.providers.apache.spark.operators.spark_submit, airflow.providers.common.sql.hooks.sql
import airflow.triggers.base
before = set(sys.modules)
for what in sys.argv[2:]:
    runpy.run_path(what) if what.endswith(".py") else importlib.import_module(what)
print(json.dumps([name for name in sys.argv[1].split(",") if name in set(sys.modules) - before]))
"""


def brought_by(*what: str, heavy: tuple[str, ...] = HEAVY) -> list[str]:
    """Which heavy packages are there once these modules, or DAG files, were imported in a new process."""
    answer = subprocess.run(
        [sys.executable, "-c", LOOK, ",".join(heavy), *what], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    found: list[str] = json.loads(answer.stdout.splitlines()[-1])
    return found


def modules(kind: str) -> list[str]:
    info: dict[str, list[dict[str, list[str]]]] = get_provider_info()  # type: ignore[assignment]
    return [module for group in info[kind] for module in group["python-modules"]]


@pytest.mark.parametrize("kind", ["operators", "hooks", "sensors", "triggers"])
def test_airflow_modules_bring_nothing_heavy_into_the_process(kind: str) -> None:
    assert brought_by(*modules(kind)) == []


def test_links_and_plugins_bring_nothing_heavy_either() -> None:
    modules = ("airflow_provider_pgrepl.links.task", "airflow_provider_pgrepl.plugins.documents")
    assert brought_by(*modules, heavy=(*HEAVY, "markdown_it")) == []


def test_the_example_dags_bring_nothing_heavy_into_the_process() -> None:
    assert brought_by(*map(str, sorted((ROOT / "dags").glob("*.py")))) == []


def test_the_look_would_see_what_a_module_brings() -> None:
    brought = brought_by("airflow_provider_pgrepl.replication.values", heavy=("pyarrow", "numba"))
    assert brought == ["pyarrow", "numba"]
