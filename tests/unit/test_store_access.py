"""store_variables.py: how a store is reached, from a driver's environment to Spark's tasks."""

from __future__ import annotations

import os

import pytest
from pyspark import cloudpickle  # type: ignore[attr-defined]

from airflow_provider_pgrepl.replication import store_variables as variables
from airflow_provider_pgrepl.replication.storage.object_store import Access, store_options
from airflow_provider_pgrepl.replication.store_variables import reaching_store, store_variables, use_store

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "eu-west-1"}


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*variables.VARIABLES, *variables._OTHER_NAMES.values()):
        monkeypatch.delenv(name, raising=False)


def test_what_was_given_stands_for_the_whole_environment(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    assert store_variables() == {"AWS_SESSION_TOKEN": "of other keys", "AWS_REGION": "us-west-2"}
    use_store(KEYS)
    assert store_variables() == KEYS
    assert store_options("s3://bucket/lake") == {
        "aws_access_key_id": "id",
        "aws_secret_access_key": "hidden",
        "aws_region": "eu-west-1",
    }
    assert store_options("/srv/lake") == {}


def test_no_library_finds_in_the_environment_what_was_not_given(monkeypatch):
    """They fill up what they are not told: a token of other keys, or another store's endpoint."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://other")
    monkeypatch.setenv("AWS_PROFILE", "other")
    use_store({})
    assert os.environ["AWS_PROFILE"] == "other"
    use_store(KEYS)
    assert not {"AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_PROFILE"} & os.environ.keys()


def test_a_task_reaches_the_store_as_its_driver_does():
    use_store(KEYS)
    task = cloudpickle.dumps(reaching_store(store_variables))
    use_store({"AWS_REGION": "of another host"})
    assert cloudpickle.loads(task)() == KEYS


def test_an_endpoint_needs_no_region_and_may_be_without_tls():
    use_store({"AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9000"})
    assert store_options("s3://bucket/lake") == {
        "aws_endpoint": "http://127.0.0.1:9000",
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
    }
    use_store({"AWS_ENDPOINT_URL_S3": "https://store.example.com"})
    assert store_options("s3://bucket/lake")["aws_allow_http"] == "false"


def test_no_secret_is_shown():
    use_store({**KEYS, "AWS_SESSION_TOKEN": "hidden, too"})
    assert "hidden" not in repr(Access.of("bucket"))
