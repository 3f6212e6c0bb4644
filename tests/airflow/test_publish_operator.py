"""PgPublishOperator, and the connection of its broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from demo.rabbitmq import Broker
from tests.airflow.conftest import LAKE
from tests.support.rabbitmq import Queue
from tests.support.received import Received
from tests.support.replicated import execute

pytestmark = pytest.mark.usefixtures("airflow_db")

NAME = "AIRFLOW_CONN_PGREPL_RABBITMQ"
PIPELINE: dict[str, Any] = {
    "name": "shop",
    "tables": ["public.*"],
    "lake": LAKE,
    "publishers": {"events": {"target": "rabbitmq"}},
}


def connect_to(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    monkeypatch.setenv(NAME, json.dumps({"conn_type": "amqp", **fields}))


def connect_source(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    parts = dict(part.split("=") for part in dsn.split())
    source = {
        "conn_type": "pgrepl",
        "host": parts["host"],
        "port": int(parts["port"]),
        "login": parts["user"],
    }
    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_DEFAULT", json.dumps({**source, "schema": parts["dbname"]}))


@pytest.mark.parametrize(
    ("target", "fields", "expected"),
    [
        ("rabbitmq", {"host": "mq"}, "amqp://guest:guest@mq/%2F"),
        (
            "rabbitmq",
            {"host": "mq", "port": 5673, "login": "a b", "password": "p/w@%", "schema": "v/1"},
            "amqp://a%20b:p%2Fw%40%25@mq:5673/v%2F1",
        ),
        (
            "rabbitmq",
            {"host": "::1", "port": 5671, "extra": {"tls": True}},
            "amqps://guest:guest@[::1]:5671/%2F",
        ),
        ("rabbitmq", {"host": "mq", "conn_type": "amqps"}, "amqps://guest:guest@mq/%2F"),
        ("nats", {"host": "n", "conn_type": "generic"}, "nats://n"),
        ("nats", {"host": "n", "port": 4222, "login": "a", "password": "b c"}, "nats://a:b%20c@n:4222"),
        ("nats", {"host": "n", "login": "token"}, "nats://token@n"),
        ("nats", {"host": "n", "extra": {"tls": True}}, "tls://n"),
        ("nats", {"host": "n", "extra": {"tls": "true"}}, "tls://n"),
        ("nats", {"host": "n", "extra": {"tls": "False"}}, "nats://n"),
        ("kafka", {"host": "a:9092,b:9093"}, "kafka://a:9092,b:9093"),
        (
            "kafka",
            {
                "host": "k",
                "port": 9093,
                "login": "me",
                "password": "p@w",
                "extra": {"tls": True, "sasl.mechanism": "SCRAM-SHA-512", "ssl.key.password": "a&b"},
            },
            "kafkas://me:p%40w@k:9093?sasl.mechanism=SCRAM-SHA-512&ssl.key.password=a%26b",
        ),
    ],
)
def test_the_uri_of_a_connection(monkeypatch, target, fields, expected):
    from airflow_provider_pgrepl.hooks.connections import target_uri

    connect_to(monkeypatch, **fields)
    assert target_uri("pgrepl_rabbitmq", target) == expected


def test_a_connection_without_a_host_is_refused(monkeypatch):
    from airflow_provider_pgrepl.hooks.connections import target_uri

    connect_to(monkeypatch)
    with pytest.raises(ConfigError, match="pgrepl_rabbitmq: has no host"):
        target_uri("pgrepl_rabbitmq", "rabbitmq")


AVRO = parse_publisher("shop", "events", {"target": "kafka", "format": "avro"})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"host": "r"}, "http://r"),
        (
            {"host": "r", "port": 8081, "schema": "https", "login": "a b", "password": "p@w"},
            "https://a%20b:p%40w@r:8081",
        ),
        ({"host": "r", "extra": {"path": "/apis/ccompat/v7"}}, "http://r/apis/ccompat/v7"),
    ],
)
def test_the_uri_of_a_schema_registry(monkeypatch, fields, expected):
    from airflow_provider_pgrepl.hooks.connections import registry_uri

    monkeypatch.setenv("AIRFLOW_CONN_PGREPL_REGISTRY", json.dumps({"conn_type": "http", **fields}))
    assert registry_uri(AVRO) == expected


def test_a_publisher_of_avro_is_given_its_registry(monkeypatch):
    from airflow_provider_pgrepl.operators.publish import PgPublishOperator

    given = {"events": {"target": "kafka", "format": "avro"}}
    for name, kind in (("KAFKA", "kafka"), ("REGISTRY", "http"), ("DEFAULT", "pgrepl")):
        monkeypatch.setenv(f"AIRFLOW_CONN_PGREPL_{name}", json.dumps({"conn_type": kind, "host": name}))
    pipeline = Pipeline.from_dict({**PIPELINE, "publishers": given})
    operator = PgPublishOperator(task_id="t", pipeline=pipeline, publisher="events", mode="caught_up")
    operator._resolved = pipeline
    assert operator.secrets()[process.REGISTRY_VARIABLE] == "http://REGISTRY"


def test_an_unknown_publisher_is_named_and_not_tried_again():
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_pgrepl.operators.publish import PgPublishOperator

    with pytest.raises(AirflowFailException, match=r"there is no 'other'\n.*the pipeline has events"):
        PgPublishOperator(task_id="t", pipeline=PIPELINE, publisher="other").execute({})


def test_publishers_of_one_pipeline_live_in_places_of_their_own():
    from airflow_provider_pgrepl.operators.publish import PgPublishOperator

    names = {
        PgPublishOperator(task_id=one, pipeline=PIPELINE, publisher=one).place_name for one in ("a", "b")
    }
    assert names == {"publish-a", "publish-b"}


@pytest.mark.thorough("unit/test_shipped: without lake tables an application needs no Java")
def test_tasks_of_a_pipeline_without_lake_tables_need_no_java(
    dsn: str, tmp_path: Path, broker: Broker, monkeypatch
):
    from airflow.sdk.exceptions import AirflowFailException

    from airflow_provider_pgrepl.operators.replication import PgReplicationOperator
    from airflow_provider_pgrepl.operators.snapshot import PgSnapshotOperator

    execute(dsn, "create table t(id int primary key)", "insert into t values (1)")
    connect_source(monkeypatch, dsn)
    fields = {
        **PIPELINE,
        "name": "p_" + dsn.split("dbname=")[1].split(maxsplit=1)[0],
        "lake": str(tmp_path / "lake"),
    }
    pipeline = Pipeline.from_dict({**fields, "lake_tables": "none", "trust_table_owners": True})
    connect_to(monkeypatch, host="127.0.0.1", port=broker.port)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    PgSnapshotOperator(task_id="snapshot", pipeline=pipeline).execute({})
    execute(dsn, "insert into t values (2)")
    queue = Queue(broker.uri, f"pgrepl.{pipeline.name}", "all")
    task = {"task_id": "replicate", "mode": "caught_up", "publisher": "events"}
    result = PgReplicationOperator(pipeline=pipeline, **task).execute({})
    assert [message.event["data"]["id"] for message in queue.take()] == [2]
    assert result["states"] == {"streaming": 1}
    with pytest.raises(AirflowFailException, match="a publisher is an app of its own"):
        PgReplicationOperator(pipeline={**fields, "lake_tables": "all"}, **task).execute({})


def test_a_task_publishes_what_there_is_and_shows_no_password(
    dsn: str, tmp_path: Path, broker: Broker, monkeypatch, capfd
):
    from airflow_provider_pgrepl.operators.publish import PgPublishOperator

    execute(dsn, "create table t(id int primary key)")
    received = Received(dsn, tmp_path, ("public.t",), flush_interval_s=0.05)
    received.begin()
    execute(dsn, "insert into t values (1), (2)")
    received.receive()
    connect_source(monkeypatch, dsn)
    broker.control("add_user", "publisher", "canary-secret")
    broker.control("set_permissions", "publisher", ".*", ".*", ".*")
    connect_to(monkeypatch, host="127.0.0.1", port=broker.port, login="publisher", password="canary-secret")
    name, lake = received.pipeline.name, received.pipeline.lake
    queue = Queue(broker.uri, f"pgrepl.{name}", "all")
    pipeline = Pipeline.from_dict({**PIPELINE, "name": name, "lake": lake})
    operator = PgPublishOperator(
        task_id="publish", pipeline=pipeline, publisher="events", mode="caught_up", master="local[1]"
    )
    result = operator.execute({})
    assert [message.event["data"]["id"] for message in queue.take()] == [1, 2]
    assert result["published"] == 2
    assert "canary-secret" not in "".join(capfd.readouterr())
