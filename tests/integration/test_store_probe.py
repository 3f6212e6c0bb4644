"""A store that cannot be used is named for what it is, before anything is begun, and no key is told."""

from __future__ import annotations

import pytest

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.storage import open_storage
from airflow_provider_pgrepl.replication.storage.store_probe import check_store
from demo.versitygw import environment_of
from tests.support.faulty_store import FaultyStore, faulty_store


def refused(lake: str, kind: type[LakeError] = LakeError) -> str:
    with pytest.raises(kind) as caught:
        check_store(lake)
    assert type(caught.value) is kind
    assert "pgrepl-secret" not in str(caught.value)
    assert caught.value.hint
    return caught.value.message.removeprefix(f"{lake}: ")


@pytest.fixture
def faulty(gateway, s3_lake, monkeypatch) -> FaultyStore:
    with faulty_store(gateway.port) as store:
        for name, value in environment_of(store.port).items():
            monkeypatch.setenv(name, value)
        yield store


def test_a_store_that_can_be_used_keeps_nothing_of_the_question(s3_lake):
    check_store(s3_lake)
    filesystem, root = open_storage(s3_lake)
    assert not filesystem.get_file_info(f"{root}/_pgrepl").is_file
    assert open_storage(s3_lake)[0].get_file_info(f"{root}/_pgrepl").size is None


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "nobody"}, "the store does not know the access key"),
        ({"AWS_SECRET_ACCESS_KEY": "wrong"}, "the secret access key is not the access key's"),
        ({"AWS_REGION": "eu-west-1"}, "the bucket is in another region"),
    ],
)
def test_keys_and_region(variables, said, s3_lake, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert refused(s3_lake) == said


def test_a_bucket_that_is_not_there(s3_lake):
    assert refused("s3://nobodys-bucket/lake") == "there is no such bucket"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("ExpiredToken", "the session token has expired"),
        ("RequestTimeTooSkewed", "this host's clock is not the store's, so that it refuses what is signed"),
        ("AccessDenied", "the store denies access"),
    ],
)
def test_what_only_amazon_answers(code, said, faulty, s3_lake):
    faulty.next(code, times=100)
    assert refused(s3_lake) == said


def test_a_store_that_is_away(faulty, s3_lake):
    faulty.close()
    assert refused(s3_lake, LakeUnavailableError) == "the store cannot be reached"


def test_a_store_that_takes_every_put(s3_lake, faulty):
    """One that passes over If-None-Match keeps no two writers apart."""
    faulty.drops_conditions = True
    assert "does not refuse to write an object that is there" in refused(s3_lake)
