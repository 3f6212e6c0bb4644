"""The part of the access to an object store that all kinds of stores share."""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, ClassVar, Self, TypeVar

from pyarrow import fs

from airflow_provider_pgrepl.replication.settings.stores import StoreLocation
from airflow_provider_pgrepl.replication.storage.errors import is_store_unavailable

if TYPE_CHECKING:
    from obstore.store import ObjectStore

Result = TypeVar("Result")
RETRY_TIMEOUT = timedelta(minutes=3)
"""The time for which a request is retried if the store does not answer, or is overloaded."""
_UNLIMITED, FEW = 10_000, 10
_TOKEN_SERVER_S = 2.0
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(milliseconds=100), timedelta(seconds=10)


@dataclass(frozen=True)
class StoreAccess(ABC):
    """A bucket with its endpoint and credentials. Equal objects access the same bucket with the same keys.

    `url`: the endpoint; empty for the store's default.
    """

    store_class: ClassVar[Callable[..., ObjectStore]]
    """The class of obstore's client."""
    prefix: ClassVar[str]
    """The prefix of deltalake's options. obstore's names of the options lack it."""
    opens_by_requests: ClassVar[bool] = False
    """Arrow's reader is not used, see `objects.open_reader`."""
    has_folders: ClassVar[bool] = False
    """Folders may exist without objects in them."""
    may_reject_batches: ClassVar[bool] = False
    """Credentials that may delete an object may lack the permission for batch requests."""

    bucket: str
    url: str

    @property
    def attempts(self) -> int:
        """The maximum number of retries of a request.

        It does not limit them, so that RETRY_TIMEOUT does. Without credentials, the libraries request a token
        from a server of the cloud, and retry that as well: outside of the cloud, they give up early.
        """
        server = self.token_server
        return _UNLIMITED if not server or _answers(server) else FEW

    @property
    def token_server(self) -> str:
        """The host, on port 80, that gives tokens to this host; empty if there are credentials."""
        return ""

    @property
    def is_plain(self) -> bool:
        """True if the endpoint is accessed without TLS."""
        return self.url.lower().startswith("http://")

    @classmethod
    @abstractmethod
    def of(cls, place: StoreLocation) -> Self:
        """Read endpoint and credentials from the environment. Raises OSError."""

    @staticmethod
    @abstractmethod
    def spark_settings() -> dict[str, str]:
        """Return the settings of Hadoop's connector, from the environment, without any key.

        Each JVM's connector reads keys from its own environment, or uses the role of its host.
        """

    @abstractmethod
    def filesystem(self) -> fs.FileSystem:
        """Return Arrow's filesystem, in which the bucket is a folder. Raises OSError."""

    @abstractmethod
    def options(self) -> dict[str, str]:
        """Return the endpoint and credentials, by the names of deltalake's storage options."""

    def store(self, patience: timedelta | None = None) -> ObjectStore:
        """Return obstore's client, for conditional puts, which Arrow does not support.

        `patience`: the time for which requests are retried; default: RETRY_TIMEOUT. Raises obstore's
        BaseError.
        """
        config = {name.removeprefix(self.prefix): value for name, value in self.options().items()}
        config.pop("allow_http", None)
        return self.store_class(
            self.bucket,
            config=config | self.for_obstore(),
            client_options={"allow_http": self.is_plain},
            retry_config={
                "retry_timeout": patience or RETRY_TIMEOUT,
                "max_retries": self.attempts,
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
            },
        )

    def delta_options(self) -> dict[str, str]:
        """Return deltalake's storage options, including those for retries."""
        return self.options() | {
            "retry_timeout": f"{RETRY_TIMEOUT.seconds}s",
            "max_retries": str(self.attempts),
            "backoff_config.init_backoff": _milliseconds(_FIRST_PAUSE),
            "backoff_config.max_backoff": _milliseconds(_LONGEST_PAUSE),
        }

    def for_obstore(self) -> dict[str, str]:
        """Return additional options for obstore's client only."""
        return {}


@cache
def _answers(host: str) -> bool:
    """Return True if a server listens on port 80 of a host."""
    try:
        with socket.create_connection((host, 80), _TOKEN_SERVER_S):
            return True
    except OSError:
        return False


def retried(call: Callable[[], Result]) -> Result:
    """Return the result of a call, which is repeated for RETRY_TIMEOUT while the store is unavailable.

    Raises what the call raises, OSError after this time.
    """
    end, pause = time.monotonic() + RETRY_TIMEOUT.total_seconds(), _FIRST_PAUSE.total_seconds()
    while True:
        try:
            return call()
        except OSError as error:
            if not is_store_unavailable(error) or time.monotonic() + pause > end:
                raise
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE.total_seconds())


def _milliseconds(time: timedelta) -> str:
    return f"{time // timedelta(milliseconds=1)}ms"


def said(options: dict[str, str]) -> dict[str, str]:
    """Return the options that are not empty: the libraries would use an empty text as the value."""
    return {name: value for name, value in options.items() if value}
