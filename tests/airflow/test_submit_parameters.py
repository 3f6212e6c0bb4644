"""Each parameter of SparkSubmitOperator is honored, or rejected by name, with the driver on the worker."""

from __future__ import annotations

import inspect
import json
import locale
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.operators.spark_app import unfollowed_timeout_s
from tests.airflow.conftest import LAKE

pytestmark = pytest.mark.usefixtures("airflow_db")

PIPELINE = {"name": "shop", "tables": ["public.*"], "lake": LAKE}


class Submitted:
    """A stand-in for spark-submit that records its arguments and environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "spark-submit"
        self.script.write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$@" >"{folder}/argv"\nenv >"{folder}/env"\n', encoding="utf-8"
        )
        self.script.chmod(0o755)

    @property
    def argv(self) -> list[str]:
        return (self.folder / "argv").read_text(encoding="utf-8").splitlines()

    @property
    def env(self) -> list[str]:
        return (self.folder / "env").read_text(encoding="utf-8").splitlines()

    def run(self, **parameters: Any) -> None:
        given = {"spark_binary": str(self.script), "poll_interval_s": 0.05, **parameters}
        operator = PgReplicationOperator(
            task_id="t", pipeline=PIPELINE, mode="caught_up", preflight=False, **given
        )
        operator.execute({})


@pytest.fixture
def submitted(tmp_path: Path) -> Submitted:
    return Submitted(tmp_path)


Check = Callable[[Submitted], bool]


def option(name: str, value: str) -> Check:
    return lambda found: value == found.argv[found.argv.index(name) + 1]


def setting(value: str) -> Check:
    return lambda found: (
        value in [text for word, text in zip(found.argv, found.argv[1:], strict=False) if word == "--conf"]
    )


HONOURED: dict[str, tuple[Any, Check]] = {
    "application": ("/some/app.py", lambda found: "/some/app.py" in found.argv),
    "application_args": (["--more", 1], lambda found: found.argv[-2:] == ["--more", "1"]),
    "archives": ("a.zip", option("--archives", "a.zip")),
    "conf": ({"spark.a": "b"}, setting("spark.a=b")),
    "deploy_mode": ("client", option("--deploy-mode", "client")),
    "driver_class_path": ("/cp", option("--driver-class-path", "/cp")),
    "driver_memory": ("3g", option("--driver-memory", "3g")),
    "env_vars": ({"OWN": "word"}, lambda found: "OWN=word" in found.env),
    "exclude_packages": ("x:y", option("--exclude-packages", "x:y")),
    "executor_cores": (3, option("--executor-cores", "3")),
    "executor_memory": ("3g", option("--executor-memory", "3g")),
    "files": ("a.txt", option("--files", "a.txt")),
    "jars": ("a.jar", option("--jars", "a.jar")),
    "keytab": ("/keytab", option("--keytab", "/keytab")),
    "name": ("a name", option("--name", "a name")),
    "num_executors": (4, option("--num-executors", "4")),
    "packages": ("x:y:1", option("--packages", "x:y:1")),
    "principal": ("me", option("--principal", "me")),
    "properties_file": ("/p", option("--properties-file", "/p")),
    "proxy_user": ("you", option("--proxy-user", "you")),
    "py_files": ("a.zip", option("--py-files", "a.zip")),
    "repositories": ("http://r", option("--repositories", "http://r")),
    "spark_binary": (None, lambda found: bool(found.argv)),
    "total_executor_cores": (5, option("--total-executor-cores", "5")),
    "use_krb5ccache": (True, setting("spark.kerberos.renewal.credentials=ccache")),
    "verbose": (True, lambda found: "--verbose" in found.argv),
    "yarn_queue": ("q", option("--queue", "q")),
}
REFUSED: dict[str, Any] = {
    "java_class": "com.example.Main",
    "status_poll_interval": 7,
    "track_driver_via_k8s_api": True,
    "yarn_rm_auth": object(),
    "yarn_track_via_rm_api": True,
}
TRIED_BELOW = {
    "conn_id",
    "durable",
    "openlineage_inject_parent_job_info",
    "openlineage_inject_transport_info",
    "post_submit_commands",
    "reconnect_on_retry",
}


def test_each_parameter_is_tried_here() -> None:
    parameters = set(inspect.signature(SparkSubmitOperator.__init__).parameters) - {"self", "kwargs"}
    assert parameters == {*HONOURED, *REFUSED, *TRIED_BELOW}


@pytest.mark.parametrize("name", sorted(HONOURED))
def test_a_parameter_reaches_spark_submit(
    submitted: Submitted, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KRB5CCNAME", "/tmp/ccache")
    value, is_honoured = HONOURED[name]
    submitted.run(**({} if value is None else {name: value}))
    assert is_honoured(submitted), submitted.argv


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_parameter_that_would_do_nothing_is_refused(submitted: Submitted, name: str) -> None:
    with pytest.raises((AirflowFailException, ConfigError), match=f"{name}: "):
        submitted.run(**{name: REFUSED[name]})
    assert not (submitted.folder / "argv").exists()


def test_the_connection_of_spark_has_a_name_of_its_own() -> None:
    with pytest.raises(ConfigError, match=r"conn_id: .*spark_conn_id"):
        PgReplicationOperator(task_id="t", pipeline=PIPELINE, conn_id="spark_default")


def test_commands_after_the_end_are_run_also_when_it_is_a_failure(submitted: Submitted) -> None:
    done = submitted.folder / "done"
    submitted.run(post_submit_commands=[f"touch {done}"])
    assert done.exists()
    done.unlink()
    submitted.script.write_text("#!/bin/sh\nexit 78\n", encoding="utf-8")
    with pytest.raises(AirflowFailException):
        submitted.run(post_submit_commands=[f"touch {done}"])
    assert done.exists()


@pytest.mark.parametrize(
    ("parameter", "key"),
    [
        ("openlineage_inject_parent_job_info", "spark.openlineage.parentRunId"),
        ("openlineage_inject_transport_info", "spark.openlineage.transport.type"),
    ],
)
def test_lineage_is_asked_of_the_same_functions_as_sparks_own_operator(
    submitted: Submitted, parameter: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inject(properties: dict[str, str], context: Any) -> dict[str, str]:
        return {**properties, key: "told"}

    name = "transport" if "transport" in parameter else "parent_job"
    module = "airflow_provider_pgrepl.operators.spark_app"
    monkeypatch.setattr(f"{module}.inject_{name}_information_into_spark_properties", inject)
    submitted.run(**{parameter: True})
    assert setting(f"{key}=told")(submitted)


class StateDatabase:
    def __init__(self) -> None:
        self.value: Any = None

    def get(self, key: str) -> Any:
        return self.value

    def set(self, key: str, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize("parameter", ["durable", "reconnect_on_retry"])
@pytest.mark.filterwarnings("ignore:`reconnect_on_retry`")
def test_one_that_is_not_durable_keeps_no_handle(submitted: Submitted, parameter: str) -> None:
    def execute(**how: Any) -> Any:
        operator = PgReplicationOperator(
            task_id="t",
            pipeline=PIPELINE,
            mode="caught_up",
            preflight=False,
            spark_binary=str(submitted.script),
            **how,
        )
        state_db = StateDatabase()
        operator.execute({"task_state_store": state_db})
        return operator, state_db.value

    _, handle = execute()
    assert isinstance(handle, str)
    operator, handle = execute(**{parameter: False})
    assert handle is None
    assert operator._following._adoption.is_fresh


def test_settings_of_a_cluster_are_taken_there(
    tmp_path: Path, submitted: Submitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark = {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": "cluster"}}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(spark))
    submitted.run(spark_conn_id="cluster", durable=False, status_poll_interval=7)
    assert submitted.argv[-3] == "pipeline.json"


@pytest.mark.parametrize("given", ["5", "15m", "nan"])
def test_time_without_a_follower_that_ends_each_app_is_refused(
    monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    monkeypatch.setenv("AIRFLOW__PGREPL__UNFOLLOWED_TIMEOUT_S", given)
    with pytest.raises(ConfigError, match=f"unfollowed_timeout_s in Airflow's configuration is {given}:"):
        unfollowed_timeout_s()


def test_jvm_may_open_enough_files_and_can_read_the_name_of_its_folder(
    submitted: Submitted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "caf\u00e9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("LC_ALL", raising=False)
    monkeypatch.setattr(locale, "nl_langinfo", lambda _: "ANSI_X3.4-1968")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, before[1]))
    try:
        submitted.run()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 1024
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert "LC_ALL=C.UTF-8" in submitted.env
