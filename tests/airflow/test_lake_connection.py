"""hooks/lake.py: an aws connection, as what a process is given to reach the lake's store."""

from __future__ import annotations

import json
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.access import access_with_lake
from airflow_provider_pgrepl.hooks.lake import lake_variables
from airflow_provider_pgrepl.operators.driver_settings import connection_strings
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.store_variables import store_variables

PIPELINE = Pipeline(
    name="shop", lake="s3://bucket/lake", tables=("public.t",), conn_id="source", lake_conn_id="lake"
)
GIVEN = {"conn_type": "aws", "login": "id", "password": "never shown"}


@pytest.fixture
def connection(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv(
        "AIRFLOW_CONN_SOURCE", json.dumps({"conn_type": "pgrepl", "host": "db", "schema": "s"})
    )

    def have(**fields: Any) -> None:
        monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(GIVEN | fields))

    have()
    return have


def test_keys_region_and_endpoint_go_to_the_driver_beside_the_dsn(connection, monkeypatch):
    connection(
        extra={"region_name": "eu-west-1", "endpoint_url": "https://s.example", "aws_session_token": "T"}
    )
    assert lake_variables(PIPELINE) == {
        "AWS_ACCESS_KEY_ID": "id",
        "AWS_SECRET_ACCESS_KEY": "never shown",
        "AWS_SESSION_TOKEN": "T",
        "AWS_REGION": "eu-west-1",
        "AWS_ENDPOINT_URL_S3": "https://s.example",
    }
    assert connection_strings(PIPELINE).items() >= lake_variables(PIPELINE).items()
    assert "never shown" not in PIPELINE.to_json()


def test_what_runs_in_the_task_itself_reaches_the_store_likewise(connection, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the worker")
    access_with_lake(PIPELINE)
    assert store_variables() == {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "never shown"}


def test_an_endpoint_of_s3_alone_comes_first(connection):
    connection(
        extra={"endpoint_url": "https://all", "service_config": {"s3": {"endpoint_url": "https://s3"}}}
    )
    assert lake_variables(PIPELINE)["AWS_ENDPOINT_URL_S3"] == "https://s3"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conn_type": "postgres"}, "a connection of type postgres"),
        ({"extra": {"role_arn": "arn:aws:iam::1:role/x"}}, "has role_arn"),
        ({"extra": {"profile_name": "x"}}, "has profile_name"),
        ({"password": None}, "only one of access key id and secret"),
    ],
)
def test_what_cannot_be_followed_is_refused_and_no_key_is_told(connection, fields, said):
    connection(**fields)
    with pytest.raises(ConfigError, match=said) as caught:
        lake_variables(PIPELINE)
    assert "never shown" not in str(caught.value)
