"""runtime/spark_submit.py: what is given for a driver's JVM elsewhere counts, and Java starts with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.runtime import compiled_loops
from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM, make_class_archive, small_jvm
from airflow_provider_pgrepl.replication.spark.session import session_settings

NAME = "SPARK_SUBMIT_OPTS"


@pytest.fixture(autouse=True)
def no_archive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The archive that `make setup` has made next to the package is not found."""
    monkeypatch.setattr(compiled_loops, "BESIDE", Path("/nowhere/compiled"))
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")


def test_existing_spark_submit_opts_are_appended_to_small_jvm_options() -> None:
    assert small_jvm({}) == {NAME: SMALL_JVM}
    assert small_jvm({NAME: "-Xss8m"}) == {NAME: f"{SMALL_JVM} -Xss8m"}


@pytest.mark.parametrize("others", ["", "-XX:+UseG1GC", "-XX:+UseParallelGC -XX:MinHeapFreeRatio=30"])
def test_java_starts_with_them_whatever_others_ask_for(others: str) -> None:
    java = shutil.which("java")
    assert java is not None
    for options in (f"{SMALL_JVM} {others}", f"{others} {SMALL_JVM}"):
        command = [java, *options.split(), "-version"]
        started = subprocess.run(command, capture_output=True, text=True, check=False)
        assert started.returncode == 0, started.stderr


def test_executors_get_them_unless_others_are_given() -> None:
    name = "spark.executor.extraJavaOptions"
    assert session_settings({}, "spark://host:7077", {}, delta=False)[name] == SMALL_JVM
    assert session_settings({name: "-Dx=1"}, "spark://host:7077", {}, delta=False)[name] == "-Dx=1"
    # Readers' sessions get no JVM options.
    packaged = {"spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0"}
    assert name not in session_settings(packaged, "spark://host:7077", {}, delta=True)


def test_pgrepl_starts_spark_submit_with_them(tmp_path: Path) -> None:
    submit, file = tmp_path / "spark-submit", tmp_path / "pipeline.json"
    submit.write_text('#!/bin/sh\necho "$SPARK_SUBMIT_OPTS"\n')
    submit.chmod(0o755)
    file.write_text('{"name": "a", "conn_id": "b", "tables": ["public.t"], "lake": "/lake"}')
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    ended = subprocess.run(
        [sys.executable, "-m", "airflow_provider_pgrepl", "replicate", str(file)],
        env={**os.environ, "PATH": path, "PGREPL_DSN": "host=nowhere", NAME: "-Xss8m"},
        capture_output=True,
        text=True,
        check=False,
    )
    given = ended.stdout.strip()
    assert given.startswith(SMALL_JVM), ended.stderr
    assert given.endswith(" -Xss8m")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache, in which archives are made because the package's folder cannot be written."""
    monkeypatch.setattr(compiled_loops, "BESIDE", tmp_path / "package" / "compiled")
    is_writable = compiled_loops.is_writable
    monkeypatch.setattr(
        compiled_loops, "is_writable", lambda path: path != tmp_path / "package" and is_writable(path)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "airflow_provider_pgrepl"


def submits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    submit = tmp_path / "spark-submit"
    submit.write_text(f"#!/bin/sh\n{script}\n")
    submit.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


WRITES = 'set -- $SPARK_SUBMIT_OPTS; echo classes >"${1#-XX:ArchiveClassesAtExit=}"'


def test_archive_of_classes_is_made_once_and_given_to_the_jvm(cache, tmp_path, monkeypatch) -> None:
    assert small_jvm({}) == {NAME: SMALL_JVM}
    submits(tmp_path, monkeypatch, WRITES)
    made = make_class_archive()
    assert made is not None
    assert made.parent == cache
    submits(tmp_path, monkeypatch, "exit 1")
    assert make_class_archive() == made
    assert small_jvm({NAME: "-Xss8m"})[NAME].startswith(f"{SMALL_JVM} -XX:SharedArchiveFile={made} ")
    assert small_jvm({NAME: "-Xss8m"})[NAME].endswith(" -Xss8m")


def test_archive_for_another_java_is_replaced(cache, tmp_path, monkeypatch) -> None:
    cache.mkdir(parents=True, mode=0o700)
    outdated = cache / "spark-0123456789ab.jsa"
    outdated.touch()
    assert small_jvm({}) == {NAME: SMALL_JVM}
    submits(tmp_path, monkeypatch, WRITES)
    assert make_class_archive() is not None
    assert not outdated.exists()


def test_archive_in_a_folder_that_others_can_write_is_not_used(cache, tmp_path, monkeypatch) -> None:
    submits(tmp_path, monkeypatch, WRITES)
    assert make_class_archive() is not None
    cache.chmod(0o777)
    assert small_jvm({}) == {NAME: SMALL_JVM}


def test_java_that_writes_no_archive_leaves_none(cache, tmp_path, monkeypatch, caplog) -> None:
    submits(tmp_path, monkeypatch, "exit 3")
    assert make_class_archive() is None
    assert "exit code 3" in caplog.text
    assert not list(cache.iterdir())
