"""settings/store_variables.py: how a store is reached, from a driver's environment to Spark's tasks."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from obstore.exceptions import BaseError
from pyarrow import fs
from pyspark import cloudpickle  # type: ignore[attr-defined]

from airflow_provider_pgrepl.replication.delta.table import open_delta
from airflow_provider_pgrepl.replication.settings import store_variables as variables
from airflow_provider_pgrepl.replication.settings.store_variables import (
    reaching_store,
    store_variables,
    use_store,
)
from airflow_provider_pgrepl.replication.settings.stores import STORES, VARIABLES, StoreLocation
from airflow_provider_pgrepl.replication.storage.errors import is_store_unavailable, storage_error
from airflow_provider_pgrepl.replication.storage.stores import (
    access_to,
    amazon,
    base,
    open_filesystem,
    open_store,
    store_options,
)

KEYS = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "hidden", "AWS_REGION": "eu-west-1"}
UNRESOLVABLE = ".".join(["n" * 60] * 5)
"""A name that the C library rejects without asking a DNS server, because of its length."""


@pytest.fixture(autouse=True)
def nothing_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variables, "_reached", set())
    others = (
        name
        for kind in STORES.values()
        for name in (*kind.others, *kind.identities, *(one.other_name for one in kind.variables))
    )
    for name in (*VARIABLES, *others):
        monkeypatch.delenv(name, raising=False)


def own_options(uri: str) -> dict[str, str]:
    """The options of a store, without those of trying again."""
    known = ("retry_", "max_retries", "backoff_")
    return {name: value for name, value in store_options(uri).items() if not name.startswith(known)}


@contextmanager
def busy_store(answers: int) -> Iterator[tuple[str, list[str]]]:
    """Yield a store that answers `answers` requests with 503 and later ones with 404, and its requests."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked.append(self.command)
            self.send_response(503 if len(asked) <= answers else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_GET  # noqa: N815 - names of the library

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()


@pytest.mark.parametrize("verb", ["GET", "HEAD", "PUT"])
def test_a_store_is_asked_again_for_as_long_as_is_documented(verb, monkeypatch):
    """The libraries give up after ten tries, which took them two seconds."""
    monkeypatch.setattr(base, "_FIRST_PAUSE", timedelta(milliseconds=1))
    monkeypatch.setattr(base, "_LONGEST_PAUSE", timedelta(milliseconds=2))
    with busy_store(50) as (url, asked):
        use_store({**KEYS, "AWS_ENDPOINT_URL_S3": url})
        store = open_store(access_to(StoreLocation("s3", "bucket", "")))
        with pytest.raises(OSError, match=r"(?i)404|not found|no such"):
            if verb == "GET":
                open_delta("s3://bucket/lake")
            elif verb == "HEAD":
                store.head("x")
            else:
                store.put("x", b"x", mode="create")
    assert asked[:51] == [verb] * 51


@pytest.mark.parametrize("client", ["obstore", "deltalake", "arrow"])
@pytest.mark.parametrize(
    ("host", "said"),
    [
        (f"{UNRESOLVABLE}:9000", f"the name {UNRESOLVABLE[:100]}"),
        ("127.0.0.1:9", "cannot connect to the store (127.0.0.1:9)"),
    ],
    ids=["unknown name", "refused"],
)
def test_store_without_connection_is_retried_and_named(client, host, said, monkeypatch):
    """After the limit, the error still says that a retry may help."""
    monkeypatch.setattr(base, "_FIRST_PAUSE", timedelta(milliseconds=1))
    monkeypatch.setattr(base, "_LONGEST_PAUSE", timedelta(milliseconds=2))
    monkeypatch.setattr(base, "RETRY_TIMEOUT", timedelta(seconds=2))
    monkeypatch.setattr(amazon, "_ATTEMPTS", 3)
    use_store({**KEYS, "AWS_ENDPOINT_URL_S3": f"http://{host}"})
    access = access_to(StoreLocation("s3", "bucket", ""))
    request: Callable[[], object] = {
        "obstore": lambda: open_store(access).head("x"),
        "deltalake": lambda: open_delta("s3://bucket/lake"),
        "arrow": lambda: open_filesystem(access).get_file_info("bucket/x"),
    }[client]
    with pytest.raises((OSError, BaseError)) as caught:
        request()
    assert is_store_unavailable(caught.value)
    assert said in storage_error("nothing was read", caught.value).message
    assert client == "arrow" or re.search(r"after [1-9]\d* retries", str(caught.value))


def test_region_is_asked_for_again_while_amazon_cannot_be_reached(monkeypatch):
    """Arrow gives up after 6 s."""
    monkeypatch.setattr(base, "_FIRST_PAUSE", timedelta(milliseconds=1))
    left = [
        OSError(
            "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket operation:"
            " curlCode: 6, Could not resolve hostname; Details: Could not resolve host: b.s3.amazonaws.com"
        )
    ] * 3

    def resolve(_: str) -> str:
        if left:
            raise left.pop()
        return "eu-west-1"

    monkeypatch.setattr(fs, "resolve_s3_region", resolve)
    assert own_options("s3://bucket-without-region/lake") == {"aws_region": "eu-west-1"}


def test_requests_at_once_do_not_use_up_each_others_tries():
    """Amazon's standard strategy allows a process a hundred in all, and later requests none."""
    with busy_store(4 * 40) as (url, asked):
        use_store({**KEYS, "AWS_ENDPOINT_URL_S3": url})
        filesystem = open_filesystem(access_to(StoreLocation("s3", "bucket", "")))
        with ThreadPoolExecutor(40) as threads:
            found = threads.map(lambda number: filesystem.get_file_info(f"bucket/{number}"), range(40))
            assert {one.type for one in found} == {fs.FileType.NotFound}
    assert len(asked) > 4 * 40


def test_arrow_asks_again_for_as_long_as_the_others():
    """Before its n-th try it waits 25 ms * 2^(n - 1), but not before the second."""
    assert sum(0.025 * 2**number for number in range(1, amazon._ATTEMPTS)) >= base.RETRY_TIMEOUT.seconds


@pytest.mark.parametrize(
    ("place", "given"),
    [
        (StoreLocation("gs", "bucket", ""), {"GOOGLE_SERVICE_ACCOUNT_KEY": "{}"}),
        (StoreLocation("abfss", "files", "", "shop1"), {"AZURE_STORAGE_ACCOUNT_KEY": "hidden"}),
    ],
    ids=["google", "azure"],
)
def test_only_a_host_without_credentials_and_cloud_gives_up_early(place, given, monkeypatch):
    """There, the libraries would request a token for three minutes."""
    servers = set()
    monkeypatch.setattr(base, "_answers", lambda host: host in servers)
    assert access_to(place).attempts == 10
    servers.add(access_to(place).token_server)
    assert access_to(place).attempts > 1000
    servers.clear()
    use_store(given)
    assert access_to(place).attempts > 1000
    assert access_to(place).delta_options()["max_retries"] == str(access_to(place).attempts)


def test_use_store_replaces_store_variables_from_environment(monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-west-2")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "of another store")
    store_options("s3://bucket/lake")
    assert store_variables() == {"AWS_SESSION_TOKEN": "of other keys", "AWS_REGION": "us-west-2"}
    use_store(KEYS)
    assert store_variables() == KEYS
    assert own_options("s3://bucket/lake") == {
        "aws_access_key_id": "id",
        "aws_secret_access_key": "hidden",
        "aws_region": "eu-west-1",
    }
    assert own_options("/srv/lake") == {}


def test_no_library_finds_in_the_environment_what_was_not_given(monkeypatch):
    """They complete missing settings: with a token of other keys, or another store's endpoint."""
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
    assert own_options("s3://bucket/lake") == {
        "aws_endpoint": "http://127.0.0.1:9000",
        "aws_allow_http": "true",
        "aws_region": "us-east-1",
    }
    use_store({"AWS_ENDPOINT_URL_S3": "https://store.example.com"})
    assert own_options("s3://bucket/lake")["aws_allow_http"] == "false"


def test_no_secret_is_shown():
    use_store({**KEYS, "AWS_SESSION_TOKEN": "hidden, too"})
    assert "hidden" not in repr(access_to(StoreLocation("s3", "bucket", "")))


def test_azure_is_reached_by_one_way_of_several(monkeypatch):
    """The libraries do not all choose the same."""
    client = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_CLIENT_SECRET": "hidden"}
    lake = "abfss://files@shop1.dfs.core.windows.net/lake"
    for name, value in client.items():
        monkeypatch.setenv(name, value)
    assert own_options(lake) == {
        "azure_storage_account_name": "shop1",
        "azure_storage_tenant_id": "t",
        "azure_storage_client_id": "c",
        "azure_storage_client_secret": "hidden",
    }
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=hidden")
    assert own_options(lake) == {
        "azure_storage_account_name": "shop1",
        "azure_storage_sas_token": "sv=hidden",
    }
    monkeypatch.setenv("AZURE_STORAGE_KEY", "hidden")
    assert own_options(lake) == {
        "azure_storage_account_name": "shop1",
        "azure_storage_account_key": "hidden",
    }
    assert "hidden" not in repr(access_to(StoreLocation("abfss", "files", "lake", "shop1")))


def test_an_identity_of_the_host_stays_its_own(monkeypatch):
    """Kubernetes gives each pod an identity by a file: the driver's would not be valid on an executor."""
    own = {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_FEDERATED_TOKEN_FILE": "/token"}
    for name, value in (own | {"GOOGLE_SERVICE_ACCOUNT": "/key"}).items():
        monkeypatch.setenv(name, value)
    store_options("abfss://files@shop1.dfs.core.windows.net/lake")
    assert store_variables() == {}
    use_store(
        {"AZURE_STORAGE_ENDPOINT": "https://shop1.blob.core.windows.net", "GOOGLE_BASE_URL": "https://g"}
    )
    assert os.environ.items() >= own.items()
    assert os.environ["GOOGLE_SERVICE_ACCOUNT"] == "/key"
    assert variables.store_variable("AZURE_CLIENT_ID") == "c"
    use_store({"AZURE_STORAGE_ACCOUNT_KEY": "hidden", "GOOGLE_SERVICE_ACCOUNT_KEY": "{}"})
    assert not {*own, "GOOGLE_SERVICE_ACCOUNT"} & os.environ.keys()


def test_use_store_with_azure_key_keeps_aws_profile(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "of the task's log")
    use_store({"AZURE_STORAGE_ACCOUNT_KEY": "hidden"})
    assert os.environ["AWS_PROFILE"] == "of the task's log"
