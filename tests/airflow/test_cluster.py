"""Deploy mode `cluster`: the parent's way, with the pipeline shipped and the secret kept back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowNotFoundException

from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
from airflow_provider_pgrepl.replication.runtime.spark_submit import small_jvm
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from tests.airflow.conftest import SECRET

RECORDER = str(Path(__file__).parent / "spark-submit-recorder")
PIPELINE = {"name": "shop", "tables": ["public.*"], "lake": "/mnt/lake"}


def test_the_pipeline_travels_with_the_application_and_the_password_does_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, airflow_db: None
) -> None:
    record = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(record))
    spark = {"conn_type": "spark", "host": "yarn", "extra": {"deploy-mode": "cluster"}}
    monkeypatch.setenv("AIRFLOW_CONN_CLUSTER", json.dumps(spark))
    PgReplicationOperator(
        task_id="replicate",
        pipeline=PIPELINE,
        mode="caught_up",
        spark_conn_id="cluster",
        spark_binary=RECORDER,
        files="/etc/other.conf",
        durable=False,
    ).execute({})
    arguments = record.with_suffix(".argv").read_text().splitlines()
    files = arguments[arguments.index("--files") + 1].split(",")
    assert files[0] == "/etc/other.conf"
    assert Path(files[1]).name == "pipeline.json"
    assert not Path(files[1]).exists(), "removed once it was shipped"
    assert arguments[-4:] == ["--pipeline", "pipeline.json", "--until", "caught-up"]
    environment = record.with_suffix(".env").read_text().splitlines()
    assert [line for line in environment if line.startswith("PGREPL_DSN")] == []
    assert SECRET not in "".join(arguments)


def test_a_driver_on_a_standalone_cluster_is_refused(
    monkeypatch: pytest.MonkeyPatch, airflow_db: None
) -> None:
    """Spark itself refuses it after its JVM has started, and every retry would do so again."""
    spark = {
        "conn_type": "spark",
        "host": "spark://master",
        "port": 7077,
        "extra": {"deploy-mode": "cluster"},
    }
    monkeypatch.setenv("AIRFLOW_CONN_STANDALONE", json.dumps(spark))
    operator = PgReplicationOperator(
        task_id="t", pipeline=PIPELINE, spark_conn_id="standalone", spark_binary=RECORDER
    )
    with pytest.raises(AirflowFailException, match=r"(?s)no driver in Python.*deploy mode to client"):
        operator.execute({})


def test_a_spark_connection_that_does_not_exist_is_an_error(airflow_db: None) -> None:
    with pytest.raises(AirflowNotFoundException, match="add a connection no_such_spark of type spark"):
        PgReplicationOperator(task_id="t", pipeline=PIPELINE, spark_conn_id="no_such_spark").execute({})


def test_a_missing_spark_submit_is_named(airflow_db: None) -> None:
    operator = PgReplicationOperator(task_id="t", pipeline=PIPELINE, spark_binary="spark-submit-9")
    with pytest.raises(AirflowFailException, match="ToolError: spark-submit-9 is neither on the PATH"):
        operator.execute({})


def test_a_missing_java_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, airflow_db: None) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(AirflowFailException, match="ToolError: no Java in JAVA_HOME"):
        PgReplicationOperator(task_id="t", pipeline=Pipeline.from_dict(PIPELINE)).execute({})


@pytest.mark.parametrize("application", ["", __file__])
def test_an_application_of_ours_starts_a_small_jvm_on_the_worker(
    application: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, airflow_db: None
) -> None:
    """Another's may want another."""
    record = tmp_path / "record"
    monkeypatch.setenv("RECORD", str(record))
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", "-Xss8m")
    PgReplicationOperator(
        task_id="replicate",
        pipeline=PIPELINE,
        mode="caught_up",
        application=application,
        spark_binary=RECORDER,
        preflight=False,
        durable=False,
    ).execute({})
    environment = record.with_suffix(".env").read_text().splitlines()
    expected = "-Xss8m" if application else small_jvm({"SPARK_SUBMIT_OPTS": "-Xss8m"})["SPARK_SUBMIT_OPTS"]
    assert f"SPARK_SUBMIT_OPTS={expected}" in environment
