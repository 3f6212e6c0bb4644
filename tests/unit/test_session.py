"""spark/session.py without a JVM."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import ToolError
from airflow_provider_pgrepl.replication.settings.stores import Connector
from airflow_provider_pgrepl.replication.spark.connectors import (
    CONNECTORS,
    DELTA_ARTIFACTS,
    JARS_VARIABLE,
    delta_jars,
)
from airflow_provider_pgrepl.replication.spark.session import check_java, session_settings


@pytest.fixture
def jars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for artifact in DELTA_ARTIFACTS:
        (tmp_path / f"{artifact}-4.4.0.jar").touch()
    (tmp_path / "jackson-core-2.13.5.jar").touch()
    monkeypatch.setenv(JARS_VARIABLE, str(tmp_path))
    return tmp_path


def fake_java(folder: Path, script: str) -> Path:
    (folder / "bin").mkdir()
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return folder


def test_only_the_jars_that_delta_needs_are_taken_from_the_folder(jars: Path) -> None:
    assert {jar.name for jar in delta_jars()} == {f"{artifact}-4.4.0.jar" for artifact in DELTA_ARTIFACTS}


def test_the_folder_in_the_current_directory_is_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".jars").mkdir()
    for artifact in DELTA_ARTIFACTS:
        (tmp_path / ".jars" / f"{artifact}-4.4.0.jar").touch()
    monkeypatch.delenv(JARS_VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    assert len(delta_jars()) == len(DELTA_ARTIFACTS)


def test_a_missing_jar_is_named_with_the_command_that_fetches_it(jars: Path) -> None:
    (jars / "delta-storage-4.4.0.jar").unlink()
    with pytest.raises(ToolError, match=r"delta-storage\n.*make jars"):
        delta_jars()


def test_submitted_settings_override_defaults_and_caller_overrides_both(jars: Path) -> None:
    submitted = {"spark.master": "local[4]", "spark.ui.enabled": "true", "spark.driver.memory": "8g"}
    settings = session_settings(submitted, None, {"spark.driver.memory": "9g"}, delta=True)
    assert settings["spark.master"] == "local[4]"
    assert settings["spark.ui.enabled"] == "true"
    assert settings["spark.driver.memory"] == "9g"


def test_other_extensions_and_jars_stay(jars: Path) -> None:
    settings = session_settings({"spark.sql.extensions": "a.B", "spark.jars": "x.jar"}, None, {}, delta=True)
    assert settings["spark.sql.extensions"] == "a.B,io.delta.sql.DeltaSparkSessionExtension"
    assert settings["spark.jars"].startswith("x.jar,")
    assert settings["spark.jars"].count(".jar") == len(DELTA_ARTIFACTS) + 1


def test_no_folder_is_needed_when_delta_comes_as_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JARS_VARIABLE, "/nowhere")
    packages = {"spark.jars.packages": "io.delta:delta-spark_4.2_2.13:4.4.0"}
    assert "spark.jars" not in session_settings(packages, None, {}, delta=True)
    assert "spark.jars" not in session_settings({}, None, {}, delta=False)


def test_a_cluster_keeps_its_own_addresses_and_a_local_master_is_bound_to_loopback() -> None:
    assert "spark.driver.host" not in session_settings({}, "spark://master:7077", {}, delta=False)
    assert session_settings({}, None, {}, delta=False)["spark.driver.bindAddress"] == "127.0.0.1"


def test_workers_come_from_our_daemon_where_it_can_be_imported(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = "spark.python.daemon.module"
    assert import_module(session_settings({}, None, {}, delta=False)[daemon])
    assert daemon not in session_settings({"spark.submit.pyFiles": "a.whl"}, "local[2]", {}, delta=False)
    assert daemon not in session_settings({}, None, {}, delta=True), "sessions of readers are their own"
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", "--py-files a.whl pyspark-shell")
    assert daemon not in session_settings({}, None, {}, delta=False)


def test_executors_are_sent_the_daemon_by_itself_beside_other_files() -> None:
    daemon = "spark.python.daemon.module"
    settings = session_settings({"spark.files": "pipeline.json"}, "spark://master:7077", {}, delta=False)
    others, sent = settings["spark.files"].split(",")
    assert others == "pipeline.json"
    assert Path(sent).is_file()
    assert Path(sent).stem == settings[daemon]
    own = session_settings({daemon: "pyspark.daemon"}, "spark://master:7077", {}, delta=False)
    assert own[daemon] == "pyspark.daemon"
    assert "spark.files" not in own
    assert daemon not in session_settings({"spark.submit.pyFiles": "a.whl"}, "yarn", {}, delta=False)


def test_no_java_names_the_apt_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolError, match=r"none on the PATH\n.*apt-get install -y openjdk-17"):
        check_java()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ToolError, match="none in JAVA_HOME"):
        check_java()


@pytest.mark.skipif(sys.platform == "win32", reason="needs a POSIX shell")
@pytest.mark.parametrize("script", ["exit 1", "echo 'openjdk version \"11.0.2\"' >&2"])
def test_an_old_or_cut_down_java_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, script)))
    with pytest.raises(ToolError, match="Java 17 or later"):
        check_java()


def test_java_17_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path, "echo 'openjdk version \"17.0.15\"' >&2")))
    check_java()


def test_readers_of_a_store_get_the_connector_and_no_key_as_a_setting(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (jars / "s3a").mkdir()
    for name in ("hadoop-aws-3.5.0.jar", "s3-2.35.4.jar"):
        (jars / "s3a" / name).touch()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-told")
    settings = session_settings({}, None, {}, delta=True)
    assert str(jars / "s3a" / "s3-2.35.4.jar") in settings["spark.jars"].split(",")
    assert settings["spark.hadoop.fs.s3a.endpoint"] == "http://127.0.0.1:9"
    assert settings["spark.hadoop.fs.s3a.endpoint.region"] == "eu-west-1"
    assert settings["spark.hadoop.fs.s3a.path.style.access"] == "true"
    assert "never-told" not in repr(settings)
    own = session_settings({"spark.hadoop.fs.s3a.endpoint": "https://own"}, None, {}, delta=True)
    assert own["spark.hadoop.fs.s3a.endpoint"] == "https://own"
    packaged = {"spark.jars.packages": "org.apache.hadoop:hadoop-aws:3.5.0"}
    assert "s3a" not in session_settings(packaged, None, {}, delta=True)["spark.jars"]


def test_readers_of_google_get_the_file_of_a_key_that_is_named(
    jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = "spark.hadoop.fs.gs.auth"
    assert session_settings({}, None, {}, delta=True)[f"{prefix}.type"] == "APPLICATION_DEFAULT"
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/etc/key.json")
    settings = session_settings({}, None, {}, delta=True)
    assert settings[f"{prefix}.type"] == "SERVICE_ACCOUNT_JSON_KEYFILE"
    assert settings[f"{prefix}.service.account.json.keyfile"] == "/etc/key.json"


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("AZURE_STORAGE_ACCOUNT_KEY", "account.key"),
        ("AZURE_STORAGE_KEY", "account.key"),
        ("AZURE_STORAGE_SAS_TOKEN", "sas.fixed.token"),
    ],
)
def test_readers_of_azure_get_the_name_of_a_variable_and_no_key(
    name: str, setting: str, jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "never-told")
    settings = session_settings({}, None, {}, delta=True)
    assert settings[f"spark.hadoop.fs.azure.{setting}"] == f"${{env.{name}}}"
    assert "never-told" not in repr(settings)


@pytest.mark.parametrize(
    "own", ["fs.azure.account.key.acme.dfs.core.windows.net", "fs.azure.sas.fixed.token", "fs.gs.auth.type"]
)
def test_keys_that_a_session_is_given_stay_alone(
    own: str, jars: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "never-told")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", "/etc/key.json")
    store = ".".join(f"spark.hadoop.{own}".split(".")[:4])
    given = {f"spark.hadoop.{own}": "own"}
    settings = session_settings(given, None, {}, delta=True)
    assert {name: value for name, value in settings.items() if name.startswith(store)} == given


@pytest.mark.parametrize("connector", CONNECTORS, ids=lambda connector: connector.folder)
def test_a_session_takes_the_connectors_that_were_fetched(connector: Connector, jars: Path) -> None:
    (jars / connector.folder).mkdir()
    jar = jars / connector.folder / f"{connector.artifact}-3.5.0.jar"
    jar.touch()
    assert str(jar) in session_settings({}, None, {}, delta=True)["spark.jars"].split(",")
    packaged = {"spark.jars.packages": f"org.apache.hadoop:{connector.artifact}:3.5.0"}
    assert str(jar) not in session_settings(packaged, None, {}, delta=True)["spark.jars"]


def test_a_jar_without_the_connector_is_not_taken(jars: Path) -> None:
    (jars / "s3a").mkdir()
    (jars / "s3a" / "s3-2.35.4.jar").touch()
    assert "s3-2" not in session_settings({}, None, {}, delta=True)["spark.jars"]
    assert not [name for name in session_settings({}, None, {}, delta=False) if "s3a" in name]
