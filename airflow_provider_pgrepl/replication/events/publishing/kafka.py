"""Kafka: events as JSON, in topics by table, with the keys of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.events.publishing.event import Event
from airflow_provider_pgrepl.replication.events.publishing.kafka_link import NOT_CHOSEN, KafkaLink
from airflow_provider_pgrepl.replication.events.publishing.target import Sending
from airflow_provider_pgrepl.replication.publisher_settings import PublisherSettings

_PROTOCOLS = {
    ("kafka", False): "plaintext",
    ("kafka", True): "sasl_plaintext",
    ("kafkas", False): "ssl",
    ("kafkas", True): "sasl_ssl",
}
_HINT = (
    "give it as kafka://host:9092,host:9092, or kafkas://user:password@host:9093?sasl.mechanism=SCRAM-SHA-512;"
    " what is special in a password is percent-encoded"
)


class Kafka:
    """A producer. `uri`: `kafka://user:password@host:port,host:port?property=value`, or `kafkas://` with TLS;
    properties are librdkafka's; never shown.

    Raises TargetError for a URI that is none.
    """

    stamp = 0

    def __init__(self, uri: str, settings: PublisherSettings) -> None:
        self._properties, self._settings = properties_of(uri), settings
        self._link: KafkaLink | None = None
        self._one_by_one = False

    @property
    def is_connected(self) -> bool:
        return self._link is not None and self._link.is_open

    def connect(self) -> None:
        """Raises TargetUnavailableError; TargetError when the login or a certificate is refused."""
        if self._link is not None:
            self._one_by_one = self._link.met_large
        self.close()
        link = KafkaLink(self._properties, self._settings, one_by_one=self._one_by_one)
        link.start()
        self._link = link

    def send(self, events: Sequence[Event]) -> Sending:
        sending = Sending(events)
        assert self._link is not None
        self._link.send(sending)
        return sending

    def close(self) -> None:
        if self._link is not None:
            self._link.stop()
            self._link = None


def properties_of(uri: str) -> dict[str, Any]:
    """librdkafka's properties. Raises TargetError, which shows nothing of the URI but names of properties."""
    try:
        parts = urlsplit(uri)
        chosen = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise _unreadable() from None
    login, _, servers = parts.netloc.rpartition("@")
    protocol = _PROTOCOLS.get((parts.scheme, bool(login)))
    if protocol is None or parts.path.strip("/") or not all(map(_is_server, servers.split(","))):
        raise _unreadable()
    if taken := sorted(name for name in chosen if name in NOT_CHOSEN or "." not in name):
        raise TargetError(
            f"the URI of Kafka sets {', '.join(taken)}",
            "what keeps order and changes, or runs something, is not chosen: leave it out",
        )
    found: dict[str, Any] = {"bootstrap.servers": servers, "security.protocol": protocol}
    if login:
        user, _, password = login.partition(":")
        found |= {
            "sasl.username": unquote(user),
            "sasl.password": unquote(password),
            "sasl.mechanism": "PLAIN",
        }
    return found | chosen


def _is_server(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.port != 0 and parts.netloc == text
    except ValueError:
        return False


def _unreadable() -> TargetError:
    return TargetError("the URI of Kafka cannot be read", _HINT)
