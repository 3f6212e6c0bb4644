"""The wheel, and what importing the core needs."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md")

# Spark runs these, or they import pyspark.
CALLED_BY_SPARK = (
    "lake.apply.applier",
    "lake.apply.merge_task",
    "lake.apply.table_schedule",
    "lake.apply.merge_scheduler",
    "lake.snapshot.range_copy",
    "lake.snapshot.snapshot_copy",
    "lake.verify.comparison",
    "lake.verify.adoption",
    "lake.verify.resync",
    "lake.verify.text_check",
    "spark.failures",
    "app.",
)

PROGRAMS = (
    "airflow_provider_pgrepl.replication.app.publish",
    "airflow_provider_pgrepl.replication.app.replicate",
    "airflow_provider_pgrepl.replication.app.snapshot",
    "airflow_provider_pgrepl.replication.app.try_events",
    "airflow_provider_pgrepl.replication.app.creek.service",
)
CLIENTS = ("pyspark", "py4j", "delta", "nats", "pika", "confluent_kafka", "fastavro", "prometheus_client")

IMPORT_THE_CORE = """
import importlib, pkgutil, sys
sys.path.insert(0, {root!r})
FORBIDDEN, LEFT_OUT = {forbidden!r}, {left_out!r}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{{name}} must not be needed")

sys.meta_path.insert(0, Refuse())
import airflow_provider_pgrepl.errors
import airflow_provider_pgrepl.replication as core
prefix = core.__name__ + "."
names = [module.name for module in pkgutil.walk_packages(core.__path__, prefix)]
for name in names:
    if not name.removeprefix(prefix).startswith(LEFT_OUT):
        importlib.import_module(name)
print(len(names), {root!r} in core.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel as hatchling builds it, in this environment, so that no network is needed."""
    folder = tmp_path_factory.mktemp("wheel")
    # A copy, because others may be writing in the checkout.
    source = folder / "source"
    source.mkdir()
    for name in ("airflow_provider_pgrepl", "spark_apps", "dags", "docs", "demo", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", *DOCUMENTS):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    result = subprocess.run(command, cwd=source, check=False, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (built,) = folder.glob("*.whl")
    return zipfile.ZipFile(built)


def read(wheel: zipfile.ZipFile, ending: str) -> str:
    (name,) = [name for name in wheel.namelist() if name.endswith(ending)]
    return wheel.read(name).decode()


def test_the_wheel_contains_the_spark_apps(wheel):
    inside = {name.rpartition("/")[2] for name in wheel.namelist() if "/spark_apps/" in name}
    assert {path.name for path in (ROOT / "spark_apps").iterdir() if path.is_file()} == inside
    assert {"snapshot.py", "replicate.py", "log4j2.properties"} <= inside


def test_the_wheel_contains_every_module_of_the_package_and_nothing_else(wheel):
    package = ROOT / "airflow_provider_pgrepl"
    modules = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    apps = {f"airflow_provider_pgrepl/spark_apps/{path.name}" for path in (ROOT / "spark_apps").glob("*.py")}
    dags = {f"airflow_provider_pgrepl/example_dags/{path.name}" for path in (ROOT / "dags").glob("*.py")}
    inside = {name for name in wheel.namelist() if name.endswith(".py")}
    assert inside == modules | apps | dags
    data = {"airflow_provider_pgrepl/example_dags/pipeline.json", "airflow_provider_pgrepl/provider.yaml"}
    assert data <= set(wheel.namelist())


def test_the_wheel_contains_the_documents(wheel):
    pages = {page.relative_to(ROOT).as_posix() for page in (ROOT / "docs").rglob("*.*") if page.is_file()}
    prefix = "airflow_provider_pgrepl/documents/"
    inside = {name.removeprefix(prefix) for name in wheel.namelist() if name.startswith(prefix)}
    assert {*pages, *DOCUMENTS, "LICENSE"} == inside


def test_airflow_finds_the_provider_by_its_entry_point(wheel):
    entry_points = configparser.ConfigParser()
    entry_points.read_string(read(wheel, "entry_points.txt"))
    assert dict(entry_points["apache_airflow_provider"]) == {
        "provider_info": "airflow_provider_pgrepl:get_provider_info"
    }
    assert dict(entry_points["console_scripts"]) == {"pgrepl": "airflow_provider_pgrepl.__main__:main"}
    assert dict(entry_points["airflow.plugins"]) == {
        "pgrepl": "airflow_provider_pgrepl.plugins.documents:PgReplPlugin"
    }
    assert "Project-URL: Documentation, https://" in read(wheel, "METADATA")


def test_the_base_install_brings_neither_airflow_nor_spark(wheel):
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in read(wheel, "METADATA").splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert any(name.startswith("deltalake") for name in required)
    assert [name for name in required if name.startswith(("apache-airflow", "pyspark", "delta-spark"))] == []


def import_the_core(
    root: Path, *forbidden: str, left_out: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    code = IMPORT_THE_CORE.format(root=str(root), forbidden=forbidden, left_out=left_out)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True, env=env, cwd="/"
    )


def test_the_whole_core_imports_without_airflow(wheel, tmp_path):
    wheel.extractall(tmp_path)
    result = import_the_core(tmp_path, "airflow")
    assert result.returncode == 0, result.stderr
    count, from_the_wheel = result.stdout.split()
    assert int(count) > 20
    assert from_the_wheel == "True"


def test_all_but_what_spark_calls_imports_without_pyspark(wheel, tmp_path):
    wheel.extractall(tmp_path)
    result = import_the_core(tmp_path, "airflow", "pyspark", "delta", left_out=CALLED_BY_SPARK)
    assert result.returncode == 0, result.stderr


def test_programs_import_without_spark_and_the_client_of_any_broker() -> None:
    """A pipeline that publishes to one broker has the client of that one alone."""
    result = import_without(CLIENTS, *PROGRAMS)
    assert result.returncode == 0, result.stderr


def test_the_guard_of_programs_would_see_a_client() -> None:
    needs_nats = "airflow_provider_pgrepl.replication.events.targets.jetstream"
    assert "import of nats halted" in import_without(CLIENTS, needs_nats).stderr


def import_without(packages: tuple[str, ...], *modules: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({packages!r}))\n"
        f"for name in {modules!r}: importlib.import_module(name)"
    )
    return subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, cwd=ROOT)


def test_the_guard_would_see_a_forbidden_import():
    assert "must not be needed" in import_the_core(ROOT, "pyarrow").stderr
