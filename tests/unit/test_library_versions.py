"""Libraries whose older versions answer wrongly without an error are rejected at the start."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.runtime.host import FLOORS, check_libraries, check_once

ROOT = Path(__file__).parents[2]


@pytest.fixture
def old_deltalake(tmp_path: Path) -> Path:
    """A folder for the front of `sys.path`, in which deltalake is installed at a version with the fault."""
    about = tmp_path / "old" / "deltalake-1.6.3.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: deltalake\nVersion: 1.6.3\n")
    return about.parent


def test_installed_libraries_are_accepted() -> None:
    check_libraries()


def test_table_is_not_opened_by_a_deltalake_that_misreads_vectors(
    old_deltalake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(old_deltalake)
    check_once.cache_clear()
    with pytest.raises(
        ToolError, match=r"deltalake 1\.6\.3 is installed, .* 1\.6\.6 or newer is needed"
    ) as raised:
        open_delta(str(tmp_path / "lake"))
    assert "pip install 'deltalake>=1.6.6'" in raised.value.hint


def test_command_ends_at_once_and_names_the_version_and_what_to_run(
    old_deltalake: Path, tmp_path: Path
) -> None:
    file = tmp_path / "pipeline.json"
    file.write_text(json.dumps({"name": "p", "lake": str(tmp_path), "tables": ["public.*"]}))
    done = subprocess.run(
        [sys.executable, "-m", "airflow_provider_pgrepl", "status", str(file)],
        env={**os.environ, "PYTHONPATH": f"{old_deltalake}:{ROOT}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 78
    assert "deltalake 1.6.3 is installed" in done.stderr
    assert "hint: pip install 'deltalake>=1.6.6'" in done.stderr


@pytest.mark.parametrize("name", FLOORS)
def test_package_demands_no_version_that_it_refuses(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = [one for group in project["optional-dependencies"].values() for one in group]
    (demanded,) = {one for one in project["dependencies"] + optional if re.match(rf"{name}\W", one)}
    assert f">={FLOORS[name][0]}" in demanded
