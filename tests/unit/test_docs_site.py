"""`make docs`: the site of the documents is built without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def build(source: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += ["-c", str(ROOT / "docs_site"), str(source), str(folder / "site")]
    environment = {**os.environ, "AIRFLOW_HOME": str(folder / "airflow")}
    return subprocess.run(command, check=False, capture_output=True, text=True, env=environment)


@pytest.mark.thorough("test_documents.py checks every link and anchor of the pages")
def test_site_has_every_page_and_every_public_class(tmp_path):
    built = build(ROOT, tmp_path)
    assert built.returncode == 0, built.stderr
    api = tmp_path / "site" / "docs_site" / "api"
    assert 'id="airflow_provider_pgrepl.lake.open_lake"' in (api / "lake.html").read_text(encoding="utf-8")
    assert "PgTeardownOperator" in (api / "operators.html").read_text(encoding="utf-8")
    for page in (ROOT / "docs").rglob("*.md"):
        assert (tmp_path / "site" / page.relative_to(ROOT).with_suffix(".html")).exists(), page


@pytest.mark.thorough("shows that the test above can fail")
@pytest.mark.parametrize("target", ["other.md#lost", "lost.md"])
def test_site_with_lost_link_is_not_built(tmp_path, target):
    source = tmp_path / "source"
    (source / "docs" / "how-to").mkdir(parents=True)
    (source / "docs" / "README.md").write_text(f"# First\n\n[other](how-to/{target})\n", encoding="utf-8")
    (source / "docs" / "how-to" / "other.md").write_text("# Other\n", encoding="utf-8")
    built = build(source, tmp_path)
    assert built.returncode != 0
    assert "xref_missing" in built.stderr
