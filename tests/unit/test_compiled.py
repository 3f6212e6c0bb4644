"""Functions compiled once on a host, by separate processes, and stored where no other user can write."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.runtime import compiled_loops
from airflow_provider_pgrepl.replication.runtime.compiled_loops import FOLDER_VARIABLE, folder

ROOT = Path(__file__).resolve().parents[2]
FIRST_START = """
import logging
import numpy as np
from airflow_provider_pgrepl.replication.runtime import compiled_loops as compiled
from airflow_provider_pgrepl.replication.lake.merge import kernels
# Not all that there are: those of other modules are compiled likewise, and before any test by `make setup`.
compiled._SHARES = (("lake.merge.kernels",),)
logging.basicConfig(level=logging.INFO)
hashes = kernels.hash_texts(np.array([0, 1, 2]), np.frombuffer(b"ab", np.uint8), np.ones(2, bool))
assert len(set(hashes.tolist())) == 2
stats = kernels.hash_texts._dispatcher.stats
print(sum(stats.cache_hits.values()), sum(stats.cache_misses.values()))
try:
    kernels.hash_texts(np.array([0.5]), b"", np.ones(2, bool))
except TypeError:
    print("refused")
"""


BLOCKING = """
import sys, time
class Blocking:
    def find_spec(self, name, *_):
        if name.endswith(".blocking"):
            open("began", "w").close()
            time.sleep(3600)
sys.meta_path.insert(0, Blocking())
"""
"""A sitecustomize: importing a module of this name takes an hour."""
ENDING = """
import time
from pathlib import Path
from airflow_provider_pgrepl.replication.runtime import compiled_loops as compiled
compiled._SHARES, compiled._marker = (("blocking",),), lambda: Path("never")
compiled.begin_compiling()
while not Path("began").exists():
    time.sleep(0.05)
"""


def first_start(place: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, FOLDER_VARIABLE: str(place)}
    command = [sys.executable, "-c", FIRST_START]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_a_process_that_serves_compiles_nothing_itself(tmp_path):
    first, second = first_start(tmp_path), first_start(tmp_path)
    for run in (first, second):
        assert run.stdout.split() == ["1", "0", "refused"], (
            "loaded from disk, and never compiled for other types"
        )
    assert "first start on this host" in first.stderr
    assert "compiled in" in first.stderr
    assert "compil" not in second.stderr


def test_processes_that_compile_end_with_the_process_that_started_them(tmp_path):
    """A shell that reads the output of a command waits for everyone who may write it."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKING)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    environment = {**os.environ, "PYTHONPATH": path, FOLDER_VARIABLE: str(tmp_path / "compiled")}
    command = [sys.executable, "-c", ENDING]
    ended = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, timeout=300, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, b"")


@pytest.fixture
def place(monkeypatch, tmp_path) -> Iterator[pytest.MonkeyPatch]:
    """Unset the variable, make the package read-only, and put the user's cache folder below `tmp_path`."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Empty and not deleted: pytest would not restore a missing variable that `folder` has set.
    monkeypatch.setenv(FOLDER_VARIABLE, "")
    (tmp_path / "package").touch()
    monkeypatch.setattr(compiled_loops, "BESIDE", tmp_path / "package" / "no folder")
    folder.cache_clear()
    yield monkeypatch
    folder.cache_clear()


def test_they_are_kept_beside_the_package_where_that_can_be_written(place, tmp_path):
    place.setattr(compiled_loops, "BESIDE", tmp_path / "site-packages" / "compiled")
    assert folder() == tmp_path / "site-packages" / "compiled"


def test_else_in_a_private_folder_of_the_user(place, tmp_path):
    own = folder()
    assert own == tmp_path / "cache" / "airflow_provider_pgrepl"
    assert own.stat().st_mode & 0o777 == 0o700


def test_compiled_functions_are_reused_from_read_only_image_package(place, tmp_path):
    image = tmp_path / "image"
    (image / "wire").mkdir(parents=True)
    (image / "wire" / "scan.nbc").write_text("machine code")
    place.setattr(compiled_loops, "BESIDE", image)
    is_writable = compiled_loops.is_writable
    place.setattr(compiled_loops, "is_writable", lambda path: path != image and is_writable(path))
    assert (folder() / "wire" / "scan.nbc").read_text() == "machine code"


def test_a_folder_that_others_can_write_is_not_used(place, tmp_path, caplog):
    open_to_all = tmp_path / "cache" / "airflow_provider_pgrepl"
    open_to_all.mkdir(parents=True)
    open_to_all.chmod(0o777)
    place.setenv(FOLDER_VARIABLE, "")
    found = folder()
    assert found != open_to_all
    assert found.stat().st_mode & 0o777 == 0o700
    assert "each start compiles them again" in caplog.text
    assert os.environ[FOLDER_VARIABLE] == str(found), "the processes that this one starts use the same"


def test_a_link_in_its_place_is_not_followed(place, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "airflow_provider_pgrepl").symlink_to(elsewhere)
    assert folder() not in (elsewhere, tmp_path / "cache" / "airflow_provider_pgrepl")
    assert not list(elsewhere.iterdir())
