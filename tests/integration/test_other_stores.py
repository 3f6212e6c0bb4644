"""Guarantees that this package needs from Google's and Azure's stores, on emulators that can fail."""

from __future__ import annotations

import os
from collections.abc import Iterator
from datetime import timedelta

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyarrow import fs

from airflow_provider_pgrepl.errors import LakeError, LakeUnavailableError
from airflow_provider_pgrepl.replication.delta.log import put_commit
from airflow_provider_pgrepl.replication.delta.table import append_delta, has_delta, open_delta
from airflow_provider_pgrepl.replication.lake.drop import drop_lake_tables
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.storage import (
    Output,
    delete_files,
    open_file,
    open_storage,
    read_commit,
    read_range,
)
from airflow_provider_pgrepl.replication.storage.probe import check_store
from airflow_provider_pgrepl.replication.storage.stores import base, store_behind
from tests.integration.test_object_store import race, receive_while_failing
from tests.support.faulty_store import FaultyStore, faulty_store
from tests.support.stores import (
    AzureServer,
    GoogleServer,
    StoreServer,
    service_account_key,
    shared_access,
)

ROUNDS = 100
ON_GOOGLE = pytest.mark.parametrize("other_store", [GoogleServer], ids=["google"], indirect=True)
ON_AZURE = pytest.mark.parametrize("other_store", [AzureServer], ids=["azure"], indirect=True)
FAULTS = ("throttled", "cut", "answer lost")


@pytest.fixture
def faulty(
    other_store: StoreServer, other_lake: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FaultyStore]:
    """A proxy to the store that can fail, to which the environment leads."""
    with faulty_store(other_store.port) as store:
        for name, value in other_store.environment_of(store.port).items():
            monkeypatch.setenv(name, value)
        yield store


def test_exactly_one_of_two_concurrent_commits_of_a_version_succeeds(other_lake):
    uri = f"{other_lake}/public/t"
    append_delta(uri, pa.table({"a": [1]}))
    for version in range(1, ROUNDS + 1):
        won = race(uri, version, 2)
        assert len(won) == 1
        assert f'"writer":{won[0]},'.encode() in (read_commit(uri, version) or b"")
    assert open_delta(uri).version() == ROUNDS


@pytest.mark.parametrize("fault", FAULTS)
def test_a_receivers_commit_whose_put_fails_once_is_its_own(fault, faulty, other_lake):
    receive_while_failing(fault, faulty, other_lake)


def test_a_commit_is_one_put(faulty, other_lake):
    uri = f"{other_lake}/public/t"
    append_delta(uri, pa.table({"a": [1]}))
    faulty.asked.clear()
    assert put_commit(uri, 1, {"operation": "test"}, [])
    assert [(asked.method, times) for asked, times in faulty.asked.items()] == [("PUT", 1)]
    assert not put_commit(uri, 1, {"operation": "test"}, [])


@pytest.mark.parametrize("rows", [1_000, 3_000_000])
def test_files_are_written_and_read_small_and_large(rows, other_lake):
    """Small files take one request, large files many."""
    table = pa.table({"a": pa.array(range(rows), pa.int64())})
    filesystem, root = open_storage(other_lake)
    path = f"{root}/public/t/x.parquet"
    with Output(filesystem, path, table.nbytes) as file:
        pq.write_table(table, file.stream, compression="none", use_dictionary=False)
        size = file.tell()
    with open_file(filesystem, path, size) as source:
        assert pq.read_table(source).equals(table)
    assert read_range(filesystem, path, 0, 4) == b"PAR1"
    assert filesystem.get_file_info(path).size == size
    with pytest.raises(FileNotFoundError):
        read_range(filesystem, f"{path}.gone", 0, 4)


def test_files_that_are_gone_are_deleted_none_the_less(other_lake):
    filesystem, root = open_storage(other_lake)
    paths = [f"{root}/t/{number}" for number in range(5)]
    for path in paths[1:4]:
        with Output(filesystem, path, 1) as file:
            file.stream.write(b"x")
    delete_files(filesystem, paths)
    delete_files(filesystem, paths[:1])
    assert not filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))


def test_dropping_lake_table_deletes_all_its_objects_and_keeps_similar_name(other_lake):
    for name in ("t", "t2"):
        append_delta(f"{other_lake}/public/{name}", pa.table({"a": [1]}))
    assert drop_lake_tables(other_lake, [TableName("public", "t")]) == [TableName("public", "t")]
    assert drop_lake_tables(other_lake, [TableName("public", "t")]) == []
    filesystem, root = open_storage(other_lake)
    left = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
    assert {info.path.split("/")[4] for info in left if info.is_file} == {"t2"}
    store, below = store_behind(filesystem), root.partition("/")[2]
    names = [one["path"] for listed in obstore.list(store, below) for one in listed]
    assert all(name.startswith(f"{below}/public/t2/") for name in names), names
    assert not has_delta(f"{other_lake}/public/t")
    assert has_delta(f"{other_lake}/public/t2")


@ON_AZURE
def test_anybody_reads_the_tables(other_lake):
    """deltalake reads them as it is, with the environment of a user's own program.

    (It would not ask one of Google's emulators without a token.)
    """
    uri = f"{other_lake}/public/t"
    append_delta(uri, pa.table({"a": [1, 2]}))
    found = DeltaTable(uri, storage_options={"allow_http": "true"}).to_pyarrow_table()
    assert found.num_rows == 2


def refused(lake: str, kind: type[LakeError] = LakeError) -> str:
    with pytest.raises(kind) as caught:
        check_store(lake)
    assert type(caught.value) is kind
    assert caught.value.hint
    return caught.value.message.removeprefix(f"{lake}: ")


def test_a_store_that_can_be_used_keeps_nothing_of_the_question(other_lake):
    check_store(other_lake)
    filesystem, root = open_storage(other_lake)
    assert not filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True, recursive=True))


def test_a_bucket_that_is_not_there(other_lake):
    assert refused(other_lake.replace("://lakes", "://nobodys")) == "there is no such bucket"


@ON_AZURE
def test_a_key_that_is_not_the_accounts(other_lake, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "d3Jvbmc=")
    said = refused(other_lake)
    assert said.startswith("the store rejects the key or the token")
    assert "d3Jvbmc" not in said


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"AZURE_STORAGE_ACCOUNT_KEY": "no base64"}, "credentials or endpoint are none"),
        ({"GOOGLE_SERVICE_ACCOUNT_KEY": "/of/a/file"}, "credentials or endpoint are none"),
    ],
    ids=["azure", "google"],
)
def test_store_with_malformed_credentials_is_rejected(variables, said, other_lake, monkeypatch):
    for name, value in variables.items():
        if name.startswith("AZURE") == other_lake.startswith("abfss"):
            monkeypatch.setenv(name, value)
            assert refused(other_lake).startswith(said)


@ON_AZURE
def test_a_token_is_used_though_the_host_has_an_identity(other_lake, monkeypatch):
    """Kubernetes gives each pod an identity, which obstore would prefer to the token."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access("racwdl"))
    for name in ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE"):
        monkeypatch.setenv(name, "of the host")
    append_delta(f"{other_lake}/public/t", pa.table({"a": [1]}))
    assert put_commit(f"{other_lake}/public/t", 1, {"operation": "test"}, [])


@ON_AZURE
@pytest.mark.parametrize("begin", ["", "?"])
def test_a_shared_access_signature_opens_the_container(begin, other_lake, monkeypatch):
    """All three libraries use it; a signature that lacks a right is denied."""
    # Azurite answers each batch deletion with an error, which is retried for so long.
    monkeypatch.setattr(base, "RETRY_TIMEOUT", timedelta(seconds=20))
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", begin + shared_access("racwdl"))
    check_store(other_lake)
    append_delta(f"{other_lake}/public/t", pa.table({"a": [1]}))
    assert drop_lake_tables(other_lake, [TableName("public", "t")])
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", shared_access("rl"))
    assert refused(other_lake) == "the store denies access"


def test_a_store_that_is_away(faulty, other_lake):
    faulty.close()
    said = refused(other_lake, LakeUnavailableError)
    assert said == f"cannot connect to the store (127.0.0.1:{faulty.port})"


@ON_GOOGLE
def test_a_service_accounts_key_is_followed_by_all_three_libraries(faulty, other_lake, monkeypatch):
    """Arrow takes it from a file only: once it has been read there is none, nor a trace of it."""
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/of/the/host")
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", service_account_key())
    check_store(other_lake)
    append_delta(f"{other_lake}/public/t", pa.table({"a": [1]}))
    filesystem, root = open_storage(other_lake)
    assert filesystem.get_file_info(f"{root}/public/t").type == fs.FileType.Directory
    assert faulty.named == {("gl-cpp", "Bearer"), ("object_store", "Bearer")}
    assert os.environ["GOOGLE_APPLICATION_CREDENTIALS"] == "/of/the/host"
