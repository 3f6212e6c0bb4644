"""Google Cloud Storage."""

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

from airflow_provider_pgrepl.replication.settings.lake import Place
from airflow_provider_pgrepl.replication.settings.store_variables import (
    GOOGLE_ENDPOINT,
    GOOGLE_KEY,
    store_variable,
)
from airflow_provider_pgrepl.replication.storage.stores.base import PATIENCE, Access, said

_CREDENTIALS = "GOOGLE_APPLICATION_CREDENTIALS"
_environment = Lock()


@dataclass(frozen=True)
class GoogleAccess(Access):
    """`key`: of a service account, as JSON; without: by Google's default credentials of the host."""

    store_class = GCSStore
    prefix = "google_"

    key: str = field(repr=False)

    @classmethod
    def of(cls, place: Place) -> GoogleAccess:
        return cls(place.bucket, store_variable(GOOGLE_ENDPOINT).rstrip("/"), store_variable(GOOGLE_KEY))

    @property
    def is_anonymous(self) -> bool:
        """An emulator is without TLS, and asks for nobody's name."""
        return self.is_plain and not self.key

    def filesystem(self) -> fs.FileSystem:
        options: dict[str, Any] = {"anonymous": self.is_anonymous, "retry_time_limit": PATIENCE}
        if self.url:
            scheme, _, host = self.url.rpartition("://")
            options |= {"endpoint_override": host, "scheme": scheme or "https"}
        with _key_in_memory(self.key):
            return fs.GcsFileSystem(**options)

    def options(self) -> dict[str, str]:
        return said(
            {
                "google_base_url": self.url,
                "google_service_account_key": _nobodys_key(self.url) if self.is_anonymous else self.key,
                "allow_http": "true" if self.is_plain else "",
            }
        )


def _nobodys_key(url: str) -> str:
    """deltalake passes over google_skip_signature, and asks the host for a token: not so with such a key."""
    nobody = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return json.dumps({"gcs_base_url": url, "disable_oauth": True, **nobody})


@contextmanager
def _key_in_memory(key: str) -> Iterator[None]:
    """Arrow takes a key from a file only, which the environment names: from one that is on no disk.

    Google's client reads it when it is made: https://google.aip.dev/auth/4110
    """
    if not key:
        yield
        return
    if not hasattr(os, "memfd_create"):
        raise OSError(f"only on Linux can a key be used from {GOOGLE_KEY}: name its file by {_CREDENTIALS}")
    file = os.memfd_create("key")
    with _environment:
        before = os.environ.get(_CREDENTIALS)
        try:
            os.write(file, key.encode())
            os.environ[_CREDENTIALS] = f"/proc/self/fd/{file}"
            yield
        finally:
            os.environ.pop(_CREDENTIALS)
            os.environ.update({} if before is None else {_CREDENTIALS: before})
            os.close(file)
