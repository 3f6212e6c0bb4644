"""NATS JetStream: events on creek's wire, or as JSON, each acknowledged by the server."""

from __future__ import annotations

from urllib.parse import urlsplit

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.creek.nats_messages import CreekMessages
from airflow_provider_pgrepl.replication.creek.stream_lake import StreamLake
from airflow_provider_pgrepl.replication.creek.streams import Accept
from airflow_provider_pgrepl.replication.events.event import Sent, Stamps
from airflow_provider_pgrepl.replication.events.targets.base import Linked
from airflow_provider_pgrepl.replication.events.targets.nats import (
    JetStreamLink,
    JetStreamReasons,
    Messages,
    PlainMessages,
)
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

_SCHEMES = ("nats", "tls")


class JetStream(Linked[JetStreamLink]):
    """A connection, served by a thread of its own. `uri`: `nats://user:password@host:port`, or `tls://…`,
    several with commas between; never shown.

    Raises TargetError for a URI that is none.
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
        self._settings, self._stamps = settings, Stamps()
        self.sent = Sent()
        self.accept_snapshot: Accept | None = None
        """Given each request for a snapshot; the subject to which it will be sent, or None."""
        self.lake: StreamLake | None = None
        """The publisher's own; creek's format needs it."""

    @property
    def stamp(self) -> int:
        return self._stamps.last

    @stamp.setter
    def stamp(self, stamp: int) -> None:
        self._stamps.last = stamp

    def connect(self) -> None:
        """Raises TargetUnavailableError; TargetError when login or a right is refused."""
        self.close()
        link = JetStreamLink(self.servers, self._settings, self._messages(), self.sent)
        link.start()
        self._link = link

    def _messages(self) -> Messages:
        if self._settings.format == "creek":
            assert self.lake is not None
            return CreekMessages(self.servers, self._settings, self._stamps, self.accept_snapshot, self.lake)
        return PlainMessages(self._settings)


def _is_readable(server: str) -> bool:
    try:
        parts = urlsplit(server)
        # The port is read when it is asked for.
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0 and not parts.fragment
    except ValueError:
        return False
