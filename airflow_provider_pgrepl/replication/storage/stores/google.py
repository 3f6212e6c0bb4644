"""Access to Google Cloud Storage."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from obstore.store import GCSStore
from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.store_variables import store_variable
from airflow_provider_pgrepl.replication.settings.stores import (
    GOOGLE_ENDPOINT,
    GOOGLE_KEY,
    GOOGLE_KEY_FILES,
    StoreLocation,
)

from .base import RETRY_TIMEOUT, StoreAccess, said

_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
_HADOOP = "spark.hadoop.fs.gs.auth"
_METADATA_HOST = "metadata.google.internal"
_environment_lock = Lock()


@dataclass(frozen=True)
class GoogleAccess(StoreAccess):
    """Access with the key of a service account, or with Google's default credentials of the host.

    `key`: the service account key as JSON; empty for the default credentials.
    """

    store_class = GCSStore
    prefix = "google_"

    key: str = field(repr=False)

    @classmethod
    def of(cls, place: StoreLocation) -> GoogleAccess:
        return cls(place.bucket, store_variable(GOOGLE_ENDPOINT).rstrip("/"), store_variable(GOOGLE_KEY))

    @property
    def is_anonymous(self) -> bool:
        """True for an endpoint without TLS and without a key: an emulator, which needs no credentials."""
        return self.is_plain and not self.key

    @property
    def token_server(self) -> str:
        has_key = self.key or self.is_anonymous or any(os.environ.get(name) for name in GOOGLE_KEY_FILES)
        return "" if has_key else os.environ.get("GCE_METADATA_HOST", _METADATA_HOST)

    def filesystem(self) -> fs.FileSystem:
        options: dict[str, Any] = {"anonymous": self.is_anonymous, "retry_time_limit": RETRY_TIMEOUT}
        if self.url:
            scheme, _, host = self.url.rpartition("://")
            options |= {"endpoint_override": host, "scheme": scheme or "https"}
        with _key_in_memory(self.key):
            return fs.GcsFileSystem(**options)

    @staticmethod
    def spark_settings() -> dict[str, str]:
        # The connector reads keys only from files, and by default asks only the metadata server of the host's
        # instance. https://hadoop.apache.org/docs/r3.5.0/hadoop-gcp/tools/hadoop-gcp/Configuration.html
        file = next((found for name in GOOGLE_KEY_FILES if (found := os.environ.get(name))), None)
        if file:
            return {
                f"{_HADOOP}.type": "SERVICE_ACCOUNT_JSON_KEYFILE",
                f"{_HADOOP}.service.account.json.keyfile": file,
            }
        return {f"{_HADOOP}.type": "APPLICATION_DEFAULT"}

    def options(self) -> dict[str, str]:
        return said(
            {
                "google_base_url": self.url,
                "google_service_account_key": _anonymous_key(self.url) if self.is_anonymous else self.key,
                "allow_http": "true" if self.is_plain else "",
            }
        )


def _anonymous_key(url: str) -> str:
    """Return a service account key that disables authentication.

    deltalake ignores google_skip_signature, and would request a token from the host.
    """
    empty = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return json.dumps({"gcs_base_url": url, "disable_oauth": True, **empty})


@contextmanager
def _key_in_memory(key: str) -> Iterator[None]:
    """Provide a service account key to Arrow through an in-memory file. Raises OSError if not on Linux.

    Arrow accepts a key only in a file that the environment names. Google's client reads the file when the
    client is created: https://google.aip.dev/auth/4110
    """
    if not key:
        yield
        return
    if not hasattr(os, "memfd_create"):
        raise OSError(
            f"{GOOGLE_KEY} is supported only on Linux: set {_CREDENTIALS} to the path of a key file"
        )
    file = os.memfd_create("key")
    with _environment_lock:
        before = os.environ.get(_CREDENTIALS)
        try:
            os.write(file, key.encode())
            os.environ[_CREDENTIALS] = f"/proc/self/fd/{file}"
            yield
        finally:
            os.environ.pop(_CREDENTIALS, None)
            os.environ.update({} if before is None else {_CREDENTIALS: before})
            os.close(file)
