"""applications.small_jvm: what is given for a driver's JVM elsewhere counts, and Java starts with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.runtime.spark_submit import SMALL_JVM, small_jvm
from airflow_provider_pgrepl.replication.spark.session_settings import session_settings

NAME = "SPARK_SUBMIT_OPTS"


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
    assert ended.stdout.strip() == f"{SMALL_JVM} -Xss8m", ended.stderr
