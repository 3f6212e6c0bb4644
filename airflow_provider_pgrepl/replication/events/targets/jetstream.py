"""The target NATS JetStream, which acknowledges each event. Events are JSON unless `messages` is replaced."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.events.event import EventNumbers, PublishedCounts
from airflow_provider_pgrepl.replication.events.targets.base import LinkedTarget
from airflow_provider_pgrepl.replication.events.targets.nats import (
    JetStreamLink,
    JetStreamReasons,
    Messages,
    PlainMessages,
)
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_SCHEMES = ("nats", "tls")


class JetStream(LinkedTarget[JetStreamLink]):
    """A connection to NATS, served by its own thread.

    `uri`: `nats://user:password@host:port`, or `tls://…`; several are separated by commas. It is never
    logged. Raises TargetError for an invalid URI.
    """

    def __init__(self, uri: str, settings: PublisherSettings) -> None:
        self.servers = uri.split(",")
        if not all(map(_is_readable, self.servers)):
            raise TargetError(
                "the URI of NATS cannot be read",
                "give it as nats://user:password@host:4222, or tls://…, several servers with commas between;"
                " what is special in a password is percent-encoded",
            )
        super().__init__(JetStreamReasons(self.servers).where)
        self._settings, self.stamps = settings, EventNumbers()
        self.sent = PublishedCounts()
        self.messages: Callable[[], Messages] = lambda: PlainMessages(settings)
        """Returns, for each connection, the converter from events to messages."""

    @property
    def stamp(self) -> int:
        return self.stamps.last

    @stamp.setter
    def stamp(self, stamp: int) -> None:
        self.stamps.last = stamp

    def connect(self) -> None:
        """Connect. Raises TargetUnavailableError, and TargetError if the login or a permission is refused."""
        self.close()
        link = JetStreamLink(self.servers, self._settings, self.messages(), self.sent)
        link.start()
        self._link = link


def _is_readable(server: str) -> bool:
    try:
        parts = urlsplit(server)
        # Reading the port checks it: an invalid one raises ValueError.
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        return False
