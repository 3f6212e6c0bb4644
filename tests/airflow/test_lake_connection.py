"""hooks/connections.py: a connection to the lake's store, as what a process is given to reach it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.hooks.connections import lake_variables
from airflow_provider_pgrepl.hooks.replication import access_to, access_with_lake
from airflow_provider_pgrepl.operators.spark_app import connection_strings, driver_environment
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.store_variables import store_variables

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


def test_lake_connection_replaces_store_variables_in_task_process(connection, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of the worker")
    access_with_lake(PIPELINE)
    assert store_variables() == {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "never shown"}


def test_dsns_of_state_and_primary_are_those_of_the_pipelines_connections_alone(connection, monkeypatch):
    for name in ("state", "primary"):
        fields = {"conn_type": "pgrepl", "host": name, "schema": "s"}
        monkeypatch.setenv(f"AIRFLOW_CONN_{name.upper()}", json.dumps(fields))
        monkeypatch.setenv(f"PGREPL_{name.upper()}_DSN", "of the worker")
    pipeline = replace(PIPELINE, state_conn_id="state", primary_conn_id="primary")
    given, access = connection_strings(pipeline), access_to(pipeline)
    assert "host=state" in given["PGREPL_STATE_DSN"] == access.state_dsn
    assert "host=primary" in given["PGREPL_PRIMARY_DSN"] == access.primary_dsn
    assert "host=primary" not in repr(access)
    environment = driver_environment(None, {}, connection_strings(PIPELINE), Path("results"))
    assert not {"PGREPL_STATE_DSN", "PGREPL_PRIMARY_DSN"} & environment.keys()


def test_an_endpoint_of_s3_alone_comes_first(connection):
    connection(
        extra={"endpoint_url": "https://all", "service_config": {"s3": {"endpoint_url": "https://s3"}}}
    )
    assert lake_variables(PIPELINE)["AWS_ENDPOINT_URL_S3"] == "https://s3"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"conn_type": "postgres"}, "a connection of type postgres"),
        ({"extra": {"role_arn": "arn:aws:iam::1:role/x"}}, "sets role_arn"),
        ({"extra": {"profile_name": "x"}}, "sets profile_name"),
        ({"password": None}, "only one of access key id and secret"),
    ],
)
def test_unsupported_lake_connection_is_rejected_without_showing_keys(connection, fields, said):
    connection(**fields)
    with pytest.raises(ConfigError, match=said) as caught:
        lake_variables(PIPELINE)
    assert "never shown" not in str(caught.value)


GOOGLES = replace(PIPELINE, lake="gs://bucket/lake")
AZURES = replace(PIPELINE, lake="abfss://files@shop1.dfs.core.windows.net/lake")
KEY = {"type": "service_account", "private_key": "never shown", "client_email": "a@b"}


@pytest.mark.parametrize("prefix", ["", "extra__google_cloud_platform__"])
def test_a_service_accounts_key_is_given_as_it_is(prefix, connection, tmp_path):
    expected = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(KEY)}
    for key in (KEY, json.dumps(KEY)):
        connection(conn_type="google_cloud_platform", extra={f"{prefix}keyfile_dict": key})
        assert lake_variables(GOOGLES) == expected
    (tmp_path / "key.json").write_text(json.dumps(KEY))
    connection(conn_type="google_cloud_platform", extra={f"{prefix}key_path": str(tmp_path / "key.json")})
    assert lake_variables(GOOGLES) == expected
    for extra in ({"project": "shop"}, {"keyfile_dict": ""}, {"keyfile_dict": "", "key_path": ""}):
        fields = {f"{prefix}{name}": value for name, value in extra.items()}
        connection(conn_type="google_cloud_platform", extra=fields)
        assert lake_variables(GOOGLES) == {}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"login": "shop1"}, {"AZURE_STORAGE_ACCOUNT_KEY": "never shown"}),
        (
            {"login": "c", "host": "https://shop1.blob.core.windows.net/", "extra": {"tenant_id": "t"}},
            {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": "never shown"},
        ),
        (
            {"login": None, "password": None, "extra": {"extra__wasb__sas_token": "?sv=never shown"}},
            {"AZURE_STORAGE_SAS_TOKEN": "?sv=never shown"},
        ),
        (
            {"extra": {"sas_token": "https://shop1.blob.core.windows.net/?sv=never shown"}, "login": "shop1"},
            {"AZURE_STORAGE_SAS_TOKEN": "sv=never shown"},
        ),
        (
            {"login": "devstoreaccount1", "host": "http://127.0.0.1:1/devstoreaccount1"},
            {
                "AZURE_STORAGE_ACCOUNT_KEY": "never shown",
                "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1/devstoreaccount1",
            },
        ),
    ],
)
def test_azures_connections_say_it_in_several_ways(fields, expected, connection):
    connection(**({"conn_type": "wasb"} | fields))
    assert lake_variables(AZURES) == expected


def test_the_second_kind_of_azures_has_the_account_as_its_host(connection):
    connection(conn_type="adls", login="c", host="shop1", extra={"tenant_id": "t"})
    assert lake_variables(AZURES)["AZURE_CLIENT_SECRET"] == "never shown"


@pytest.mark.parametrize(
    ("pipeline", "fields", "said"),
    [
        (GOOGLES, {"conn_type": "aws"}, "a connection of type aws"),
        (AZURES, {"conn_type": "aws"}, "a connection of type aws"),
        (
            AZURES,
            {"conn_type": "wasb", "login": "other"},
            "belongs to storage account other, but the lake is in shop1",
        ),
        (AZURES, {"conn_type": "wasb", "extra": {"connection_string": "x"}}, "sets connection_string"),
        (
            AZURES,
            {"conn_type": "adls", "password": None, "host": "shop1", "extra": {"tenant_id": "t"}},
            "lacks the client id",
        ),
        (
            GOOGLES,
            {"conn_type": "google_cloud_platform", "extra": {"keyfile_dict": "never shown"}},
            "not the JSON",
        ),
        (GOOGLES, {"conn_type": "google_cloud_platform", "extra": {"key_path": "/gone"}}, "cannot read"),
        (
            GOOGLES,
            {"conn_type": "google_cloud_platform", "extra": {"impersonation_chain": "x"}},
            "impersonation",
        ),
    ],
)
def test_mismatched_google_or_azure_connection_is_rejected_without_showing_keys(
    pipeline, fields, said, connection
):
    connection(**fields)
    with pytest.raises(ConfigError, match=said) as caught:
        lake_variables(pipeline)
    assert "never shown" not in str(caught.value)
