"""driver_jvm.py: what is given for a driver's JVM elsewhere counts, and Java starts with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from airflow_provider_pgrepl.driver_jvm import OPTIONS, small_jvm
from airflow_provider_pgrepl.replication.lake.session_settings import SERIAL_COLLECTOR, SMALL_JVM

OTHER = "-XX:+UseG1GC -Dhouse=1"


def options(submit: str = "/spark/bin/spark-submit", *command: str, **environment: str) -> str:
    return small_jvm([submit, *command], environment)[OPTIONS]


def test_a_jvm_of_which_nothing_is_said_is_small_with_one_collector() -> None:
    assert options() == f"{SERIAL_COLLECTOR} {SMALL_JVM}"


@pytest.mark.parametrize("name", [OPTIONS, "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS"])
def test_a_collector_in_the_environment_is_the_only_one(name: str) -> None:
    found = options(**{name: OTHER})
    assert SERIAL_COLLECTOR not in found
    assert SMALL_JVM in found


def test_what_the_variable_had_comes_behind_ours() -> None:
    assert options(**{OPTIONS: "-Xss8m"}) == f"{SERIAL_COLLECTOR} {SMALL_JVM} -Xss8m"


@pytest.mark.parametrize(
    "command",
    [
        ("--conf", f"spark.driver.extraJavaOptions={OTHER}"),
        ("--driver-java-options", OTHER),
        (f"--conf=spark.driver.defaultJavaOptions={OTHER}",),
    ],
)
def test_a_collector_on_the_command_line_is_the_only_one(command: tuple[str, ...]) -> None:
    assert SERIAL_COLLECTOR not in options("/spark/bin/spark-submit", *command)


def test_a_collector_in_a_file_of_settings_is_the_only_one(tmp_path: Path) -> None:
    file = tmp_path / "conf" / "spark-defaults.conf"
    file.parent.mkdir()
    file.write_text(f"spark.driver.extraJavaOptions {OTHER}\n")
    submit = str(tmp_path / "bin" / "spark-submit")
    for found in (
        options(submit),
        options(SPARK_HOME=str(tmp_path)),
        options(SPARK_CONF_DIR=str(file.parent)),
        options("spark-submit", "--properties-file", str(file)),
        options("spark-submit", f"--properties-file={file}"),
    ):
        assert SERIAL_COLLECTOR not in found
    assert SERIAL_COLLECTOR in options(submit, SPARK_CONF_DIR=str(tmp_path))
    assert SERIAL_COLLECTOR in options("spark-submit", "--properties-file", "/nowhere", "--properties-file")


def test_java_starts_with_them() -> None:
    java = shutil.which("java")
    assert java is not None
    for given in ("", OTHER):
        command = [java, *options(**{OPTIONS: given}).split(), "-version"]
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
