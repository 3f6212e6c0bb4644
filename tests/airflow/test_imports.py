"""Modules that parsing a DAG imports: Airflow's own, this package's, and a driver of PostgreSQL."""

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
import importlib, json, os, runpy, sys
import airflow.providers.apache.spark.operators.spark_submit, airflow.providers.common.sql.hooks.sql
import airflow.triggers.base
before = set(sys.modules)
for looked_at, heavy in json.loads(sys.argv[1]):
    # A process of its own for each, which has what Airflow itself brings.
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"{looked_at}: cannot be imported")
        continue
    for what in looked_at:
        runpy.run_path(what) if what.endswith(".py") else importlib.import_module(what)
    print(json.dumps([name for name in heavy if name in set(sys.modules) - before]), flush=True)
    sys.exit(0)
"""


def modules(kind: str) -> list[str]:
    info: dict[str, list[dict[str, list[str]]]] = get_provider_info()  # type: ignore[assignment]
    return [module for group in info[kind] for module in group["python-modules"]]


LOOKED_AT = {
    **{kind: (modules(kind), HEAVY) for kind in ("operators", "hooks", "sensors", "triggers")},
    "links and plugins": (
        ["airflow_provider_pgrepl.links.task", "airflow_provider_pgrepl.plugins.documents"],
        (*HEAVY, "markdown_it"),
    ),
    "example DAGs": ([str(path) for path in sorted((ROOT / "dags").glob("*.py"))], HEAVY),
    "values": (["airflow_provider_pgrepl.replication.values"], ("pyarrow", "numba")),
}


@pytest.fixture(scope="module")
def brought() -> dict[str, list[str]]:
    """Return the heavy packages that are there once these modules, or DAG files, were imported."""
    answer = subprocess.run(
        [sys.executable, "-c", LOOK, json.dumps(list(LOOKED_AT.values()))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0, answer.stderr
    found = [json.loads(line) for line in answer.stdout.splitlines() if line.startswith("[")]
    return dict(zip(LOOKED_AT, found, strict=True))


@pytest.mark.parametrize("kind", ["operators", "hooks", "sensors", "triggers"])
def test_airflow_modules_bring_nothing_heavy_into_the_process(
    brought: dict[str, list[str]], kind: str
) -> None:
    assert LOOKED_AT[kind][0]
    assert brought[kind] == []


def test_links_and_plugins_bring_nothing_heavy_either(brought: dict[str, list[str]]) -> None:
    assert brought["links and plugins"] == []


def test_the_example_dags_bring_nothing_heavy_into_the_process(brought: dict[str, list[str]]) -> None:
    assert LOOKED_AT["example DAGs"][0]
    assert brought["example DAGs"] == []


def test_the_look_would_see_what_a_module_brings(brought: dict[str, list[str]]) -> None:
    assert brought["values"] == ["pyarrow"]
