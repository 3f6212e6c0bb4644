"""What a Kafka client is given: what a URI says, and what order and delivery depend on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.settings.publisher_settings import PublisherSettings

Properties = dict[str, Any]

TRANSACTION_TIMEOUT = "transaction.timeout.ms"
LONGEST_TRANSACTION_MS = 900_000
"""What brokers allow by default, transaction.max.timeout.ms."""
_PROTOCOLS = {
    ("kafka", False): "plaintext",
    ("kafka", True): "sasl_plaintext",
    ("kafkas", False): "ssl",
    ("kafkas", True): "sasl_ssl",
}
_ANSWER_MS = 60_000
"""How long a message may take, all of the client's own attempts included."""
_GIVEN: Properties = {
    # In order, each once, for as long as the producer lives; and counted when all replicas in sync have it.
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": _ANSWER_MS,
    "socket.timeout.ms": _ANSWER_MS // 3,
    # Where Kafka's own clients put a key.
    "partitioner": "murmur2_random",
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 64 << 10,
}
_LINGER = {"linger.ms": 5}
_OF_CODE = ("plugin.library.paths", "sasl.kerberos.kinit.cmd", "default.topic.config")
_NOT_CHOSEN = {"bootstrap.servers", "transactional.id", "delivery.report.only.error", *_OF_CODE, *_GIVEN}
"""Properties that a URI may not set: order and delivery depend on them, or they run something."""
_OF_THE_PRODUCER = (
    {"message.max.bytes", "batch.num.messages", "transactional.id", TRANSACTION_TIMEOUT, "linger.ms"}
    | _GIVEN.keys()
) - {"socket.timeout.ms"}
_OVERHEAD = 1024
"""Of a message, beside its body: key, headers, and what Kafka adds."""
_HINT = (
    "give it as kafka://host:9092,host:9092, or kafkas://user:password@host:9093?sasl.mechanism=SCRAM-SHA-512;"
    " what is special in a password is percent-encoded"
)


def properties_of(uri: str) -> Properties:
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
    if taken := sorted(name for name in chosen if name in _NOT_CHOSEN or "." not in name):
        raise TargetError(
            f"the URI of Kafka sets {', '.join(taken)}",
            "what keeps order and changes, or runs something, is not chosen: leave it out",
        )
    timeout = chosen.get(TRANSACTION_TIMEOUT, "1")
    if not timeout.isascii() or not timeout.isdigit() or not int(timeout):
        raise TargetError(f"the URI of Kafka: {TRANSACTION_TIMEOUT} is no number of milliseconds")
    found: Properties = {"bootstrap.servers": servers, "security.protocol": protocol}
    if login:
        user, _, password = login.partition(":")
        found |= {
            "sasl.username": unquote(user),
            "sasl.password": unquote(password),
            "sasl.mechanism": "PLAIN",
        }
    return found | chosen


def of_producer(given: Mapping[str, Any], settings: PublisherSettings, *, one_by_one: bool) -> Properties:
    """Of a publisher's producer. `one_by_one`: no two messages in one batch."""
    largest = settings.max_event_bytes + _OVERHEAD
    found = {**_LINGER, **given, **_GIVEN, "message.max.bytes": max(largest, 1_000_000)}
    if settings.transactions:
        timeout_ms = int(found.setdefault(TRANSACTION_TIMEOUT, LONGEST_TRANSACTION_MS))
        found["transactional.id"] = f"pgrepl.{settings.source}.{settings.name}"
        # The client does not take a transaction that ends before its messages.
        for name in ("message.timeout.ms", "socket.timeout.ms"):
            found[name] = min(_GIVEN[name], timeout_ms)
    if one_by_one:
        found["batch.num.messages"] = 1
    return found


def of_admin(producers: Mapping[str, Any]) -> Properties:
    """Of the client that makes topics, beside a producer."""
    return {name: value for name, value in producers.items() if name not in _OF_THE_PRODUCER}


def _is_server(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.port != 0 and parts.netloc == text
    except ValueError:
        return False


def _unreadable() -> TargetError:
    return TargetError("the URI of Kafka cannot be read", _HINT)
