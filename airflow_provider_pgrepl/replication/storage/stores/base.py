"""Access: a bucket, and how it is reached."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar

from pyarrow import fs

if TYPE_CHECKING:
    from obstore.store import ObjectStore

PATIENCE = timedelta(minutes=3)
"""For how long what a store does not answer, or has no time for, is asked again."""
_FIRST_PAUSE, _LONGEST_PAUSE = timedelta(milliseconds=100), timedelta(seconds=10)


@dataclass(frozen=True)
class Access(ABC):
    """Equal ones reach the same bucket with the same keys. `url`: empty for the store's own."""

    store_class: ClassVar[Callable[..., ObjectStore]]
    """The class of obstore's."""
    prefix: ClassVar[str]
    """Of deltalake's options, which obstore has without."""
    attempts: ClassVar[int] = 10
    """How often a request is tried again at most; the libraries' own limit."""

    bucket: str
    url: str

    @property
    def is_plain(self) -> bool:
        """Whether without TLS."""
        return self.url.lower().startswith("http://")

    @abstractmethod
    def filesystem(self) -> fs.FileSystem:
        """Arrow's filesystem, in which the bucket is a folder. Raises OSError."""

    @abstractmethod
    def options(self) -> dict[str, str]:
        """What deltalake is to be told of the store and its keys, by deltalake's names."""

    def store(self, patience: timedelta | None = None) -> ObjectStore:
        """For a put on condition, which Arrow does not know; `patience`: another than PATIENCE. Raises
        BaseError of obstore's."""
        config = {name.removeprefix(self.prefix): value for name, value in self.options().items()}
        config.pop("allow_http", None)
        return self.store_class(
            self.bucket,
            config=config | self.for_obstore(),
            client_options={"allow_http": self.is_plain},
            retry_config={
                "retry_timeout": patience or PATIENCE,
                "max_retries": self.attempts,
                "backoff": {"init_backoff": _FIRST_PAUSE, "max_backoff": _LONGEST_PAUSE, "base": 2},
            },
        )

    def delta_options(self) -> dict[str, str]:
        """What deltalake is to be told, with how long to try again."""
        return self.options() | {
            "retry_timeout": f"{PATIENCE.seconds}s",
            "max_retries": str(self.attempts),
            "backoff_config.init_backoff": _milliseconds(_FIRST_PAUSE),
            "backoff_config.max_backoff": _milliseconds(_LONGEST_PAUSE),
        }

    def for_obstore(self) -> dict[str, str]:
        """What obstore alone is to be told beside."""
        return {}


def _milliseconds(time: timedelta) -> str:
    return f"{time // timedelta(milliseconds=1)}ms"


def said(options: dict[str, str]) -> dict[str, str]:
    """Those of them that say something: the libraries take an empty one for a value."""
    return {name: value for name, value in options.items() if value}
