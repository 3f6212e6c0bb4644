"""Access: a bucket with its endpoint and credentials."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from pyarrow import fs

if TYPE_CHECKING:
    from obstore.store import ObjectStore

RETRY_TIMEOUT = timedelta(minutes=3)
"""The time for which a request is retried if the store does not answer, or is overloaded."""
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
    attempts: ClassVar[int] = 10
    """The maximum number of retries of a request; the default is that of the libraries."""

    bucket: str
    url: str

    @property
    def is_plain(self) -> bool:
        """True if the endpoint is accessed without TLS."""
        return self.url.lower().startswith("http://")

    @abstractmethod
    def filesystem(self) -> fs.FileSystem:
        """Return Arrow's filesystem, in which the bucket is a folder. Raises OSError."""

    @abstractmethod
    def options(self) -> dict[str, str]:
        """Return the endpoint and credentials, by the names of deltalake's storage options."""

    def store(self, patience: timedelta | None = None) -> ObjectStore:
        """Return obstore's client, for conditional puts, which Arrow does not support.

        `patience`: the time for which requests are retried; default: PATIENCE. Raises obstore's BaseError.
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


def _milliseconds(time: timedelta) -> str:
    return f"{time // timedelta(milliseconds=1)}ms"


def said(options: dict[str, str]) -> dict[str, str]:
    """Return the options that are not empty: the libraries would use an empty text as the value."""
    return {name: value for name, value in options.items() if value}
