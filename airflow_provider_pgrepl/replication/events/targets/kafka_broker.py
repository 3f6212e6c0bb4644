"""Kafka's brokers: topics, transactions, client properties, and the errors for what the client reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings

from .base import PendingEvents, topic, topic_of

_REFUSED = frozenset(
    {
        KafkaError._AUTHENTICATION,
        KafkaError.SASL_AUTHENTICATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    }
)
_OF_A_TOPIC = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "the user may not write it",
    KafkaError.UNKNOWN_TOPIC_OR_PART: "it is not there",
    KafkaError._UNKNOWN_TOPIC: "it is not there",
    KafkaError._UNKNOWN_PARTITION: "it is not there",
    KafkaError.TOPIC_EXCEPTION: "its name is refused; Kafka takes no two that differ in . and _ alone",
    KafkaError.POLICY_VIOLATION: "a policy of the cluster is against it",
    KafkaError.INVALID_PARTITIONS: "the cluster's default number of partitions is refused",
    KafkaError.INVALID_RECORD: "it does not take such a message",
    KafkaError.INVALID_TIMESTAMP: "it does not take the time of the commit (message.timestamp.…max.ms)",
    KafkaError._INVALID_DIFFERENT_RECORD: "it does not take such a message",
}
TOO_LARGE = frozenset({KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE})
OF_ANOTHER = frozenset({KafkaError._INVALID_DIFFERENT_RECORD})
"""The broker rejected the batch because of another message in it."""
_HINT = "are its brokers there? Events wait in the changelog meanwhile"
_LONGEST = 249
_MOST_ROUTES = 10_000
"""The highest number of cached topics of business events, whose names depend on data."""
_BY_TABLE = "{table}"
_ANSWER_S = 30.0
_CLUSTERS_DEFAULT = -1
Properties = dict[str, Any]
TRANSACTION_TIMEOUT = "transaction.timeout.ms"
LONGEST_TRANSACTION_MS = 900_000
"""The brokers' default limit, transaction.max.timeout.ms."""
_PROTOCOLS = {
    ("kafka", False): "plaintext",
    ("kafka", True): "sasl_plaintext",
    ("kafkas", False): "ssl",
    ("kafkas", True): "sasl_ssl",
}
_ANSWER_MS = 60_000
"""The time limit to deliver a message, including all retries by the client."""
_GIVEN: Properties = {
    # In order and without duplicates while the producer lives; acknowledged by all in-sync replicas.
    "enable.idempotence": True,
    "acks": "all",
    "message.timeout.ms": _ANSWER_MS,
    "socket.timeout.ms": _ANSWER_MS // 3,
    # Use the same partition for a key as Kafka's own clients.
    "partitioner": "murmur2_random",
    "queue.buffering.max.messages": 200_000,
    "queue.buffering.max.kbytes": 64 << 10,
}
_LINGER = {"linger.ms": 5}
_OF_CODE = ("plugin.library.paths", "sasl.kerberos.kinit.cmd", "default.topic.config")
_NOT_CHOSEN = {"bootstrap.servers", "transactional.id", "delivery.report.only.error", *_OF_CODE, *_GIVEN}
"""Properties that a URI cannot set: order and delivery depend on them, or they run code."""
_OF_THE_PRODUCER = (
    {"message.max.bytes", "batch.num.messages", "transactional.id", TRANSACTION_TIMEOUT, "linger.ms"}
    | _GIVEN.keys()
) - {"socket.timeout.ms"}
_OVERHEAD = 1024
"""The bytes of a message in addition to its body: key, headers and fields of Kafka."""
_URI_HINT = (
    "give it as kafka://host:9092,host:9092, or kafkas://user:password@host:9093?sasl.mechanism=SCRAM-SHA-512;"
    " what is special in a password is percent-encoded"
)
_CONNECT_S, _COMMIT_S, _ABORT_S, _PAUSE_S = 20.0, 60.0, 5.0, 0.2
_FENCED = frozenset(
    {KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}
    | {KafkaError.INVALID_TXN_STATE, KafkaError.INVALID_PRODUCER_ID_MAPPING}
)
"""Also reported after the brokers have aborted a transaction that took too long."""


class KafkaReasons:
    """The errors of one connection. Messages of librdkafka name brokers, but neither credentials nor rows."""

    def __init__(self, properties: Mapping[str, Any]) -> None:
        self._user = properties.get("sasl.username", "")
        self.where = f"Kafka at {properties['bootstrap.servers']}"

    def error_of(self, error: KafkaError) -> PgReplError:
        """Return the error with which a client error ends the connection."""
        if error.code() in _REFUSED:
            return self.refused(
                f"the login{f' of {self._user}' if self._user else ''} was refused",
                "look at the connection's login, password and sasl.mechanism",
            )
        if error.code() == KafkaError._SSL and "certificate verify failed" in error.str():
            return self.refused(
                "the brokers' certificate was refused",
                "name the hosts as their certificates do, and give the authority's as ssl.ca.location",
            )
        return self.away(error.str())

    def away(self, what: str) -> TargetUnavailableError:
        """Return the error for a temporarily unavailable cluster."""
        return TargetUnavailableError(f"{self.where}: {what}", _HINT)

    def refused(self, what: str, hint: str) -> TargetError:
        """Return the error for a cluster that accepts nothing until an administrator changes something."""
        return TargetError(f"{self.where}: {what}", hint)


def property_error(error: Exception, given: Iterable[str]) -> TargetError:
    """Return the error for properties of which the client rejects one.

    The client's message may hold the value.
    """
    named = [name for name in given if f'"{name}"' in str(error)]
    what = ", ".join(named) or "one of the connection's"
    return TargetError(
        f"Kafka: property {what}: there is no such one, or not with such a value",
        "they are librdkafka's, see its CONFIGURATION.md",
    )


def reason_of_topic(error: KafkaError, topic: str) -> str:
    """Return the reason why a topic accepts no event of its table; empty if the topic is not the cause."""
    found = _OF_A_TOPIC.get(error.code())
    return f"topic {topic}: {found}" if found else ""


class UnusableTopicError(Exception):
    """Events cannot be sent to a topic until a person fixes the cause. The text says why."""


class Topics:
    """The topics of one connection. Missing topics are created with the cluster's defaults."""

    def __init__(
        self, settings: PublisherSettings, producer: Producer, admin: AdminClient, reasons: KafkaReasons
    ) -> None:
        self._settings, self._template = settings, settings.topic
        self._producer, self._admin, self._reasons = producer, admin, reasons
        self._of_table: dict[str, tuple[str, str]] = {}
        self._of_route: dict[str, str] = {}
        self._table_of: dict[str, str] = {}

    def find(self, event: Event) -> str:
        """Return the topic of an event, after checking that it exists.

        Raises UnusableTopicError, and for other errors those of KafkaReasons.
        """
        if event.business is None:
            return self._find(event.table)
        name = topic(event, self._settings)
        if name not in self._of_route:
            if len(self._of_route) >= _MOST_ROUTES:
                self._of_route.clear()
            self._of_route[name] = self._reason_to_refuse(name)
        if reason := self._of_route[name]:
            raise UnusableTopicError(reason)
        return name

    def _find(self, table: str) -> str:
        if table not in self._of_table:
            name = topic_of(self._template, table)
            self._of_table[table] = name, self._reason_against(name, table)
        name, reason = self._of_table[table]
        if reason:
            raise UnusableTopicError(reason)
        return name

    def partitions(self, topic: str) -> list[int]:
        """Return all current partitions of a topic."""
        try:
            found = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic]
        except KafkaException as error:
            raise self._reasons.error_of(error.args[0]) from None
        if not found.partitions:
            raise self._reasons.away(f"topic {topic} has temporarily no partitions")
        return sorted(found.partitions)

    def _reason_against(self, topic: str, table: str) -> str:
        # Rows of two tables with the same key would be one row in a shared topic.
        owner = self._table_of.setdefault(topic, table)
        if owner != table and _BY_TABLE in self._template:
            return (
                f"topic {topic}: {owner} is published to it already, and rows of two tables with the same key"
                " would replace each other"
            )
        return self._reason_to_refuse(topic)

    def _reason_to_refuse(self, topic: str) -> str:
        if len(topic) > _LONGEST or topic in ("", ".", ".."):
            return f"topic {topic}: Kafka takes no such name"
        try:
            error = self._producer.list_topics(topic, timeout=_ANSWER_S).topics[topic].error
            if error is not None and error.code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                error = self._make(topic)
        except KafkaException as raised:
            error = raised.args[0]
        if error is None or error.code() == KafkaError.LEADER_NOT_AVAILABLE:
            return ""
        if reason := reason_of_topic(error, topic):
            return reason
        raise self._reasons.error_of(error)

    def _make(self, topic: str) -> KafkaError | None:
        """Create a topic with the cluster's default number of partitions and replicas."""
        wanted = NewTopic(topic, _CLUSTERS_DEFAULT, _CLUSTERS_DEFAULT)
        try:
            self._admin.create_topics([wanted], request_timeout=_ANSWER_S)[topic].result()
        except KafkaException as raised:
            error: KafkaError = raised.args[0]
            return None if error.code() == KafkaError.TOPIC_ALREADY_EXISTS else error
        return None


def properties_of(uri: str) -> Properties:
    """Return librdkafka's properties.

    Raises TargetError, which shows only names of properties from the URI.
    """
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
            "remove these properties from the URI: the publisher sets them itself, or does not allow them",
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
    """Return the properties of a publisher's producer. `one_by_one`: every batch has a single message."""
    largest = settings.max_event_bytes + _OVERHEAD
    found = {**_LINGER, **given, **_GIVEN, "message.max.bytes": max(largest, 1_000_000)}
    if settings.transactions:
        timeout_ms = int(found.setdefault(TRANSACTION_TIMEOUT, LONGEST_TRANSACTION_MS))
        found["transactional.id"] = f"pgrepl.{settings.source}.{settings.name}"
        # The client rejects a transaction timeout that is shorter than the timeout of messages.
        for name in ("message.timeout.ms", "socket.timeout.ms"):
            found[name] = min(_GIVEN[name], timeout_ms)
    if one_by_one:
        found["batch.num.messages"] = 1
    return found


def of_admin(producers: Mapping[str, Any]) -> Properties:
    """Return the properties of the admin client, which creates topics, from those of a producer."""
    return {name: value for name, value in producers.items() if name not in _OF_THE_PRODUCER}


def _is_server(text: str) -> bool:
    try:
        parts = urlsplit(f"//{text}")
        return bool(parts.hostname) and parts.port != 0 and parts.netloc == text
    except ValueError:
        return False


def _unreadable() -> TargetError:
    return TargetError("the URI of Kafka cannot be read", _URI_HINT)


class KafkaTransactions:
    """The transactions of one producer.

    Only the publisher's thread calls the methods; another thread polls for delivery reports at the same time.
    `is_whole`: True if the open transaction may be committed.
    """

    def __init__(self, producer: Producer, timeout_ms: int, reasons: KafkaReasons) -> None:
        self._producer, self._timeout_s, self._reasons = producer, timeout_ms / 1_000, reasons
        self._open: list[PendingEvents] = []
        self.is_whole = True
        self._began_at = 0.0

    def begin(self) -> None:
        """Fence an earlier producer of the same name, and abort its open transaction.

        Call once, before all other methods. Raises the errors of KafkaReasons, and TargetError if the cluster
        permanently rejects transactions.
        """
        try:
            self._producer.init_transactions(_CONNECT_S)
        except KafkaException as error:
            raise self._error_of(error.args[0]) from None

    def take(self, sending: PendingEvents) -> None:
        """Add the events that are sent next to the open transaction, or begin one."""
        self.is_whole = sending.ends_transaction
        if not sending.count:
            return
        if not self._open:
            try:
                self._producer.begin_transaction()
            except KafkaException as error:
                raise self.reason_of(error.args[0]) from None
            self._began_at = time.monotonic()
        sending.waits_for_commit = True
        self._open.append(sending)

    def commit(self) -> None:
        """Commit the open transaction.

        After an error of KafkaReasons it is unknown whether it is committed.
        """
        deadline = time.monotonic() + _COMMIT_S
        while True:
            try:
                self._producer.commit_transaction(_COMMIT_S)
                break
            except KafkaException as error:
                cause = error.args[0]
                if not cause.retriable() or time.monotonic() > deadline:
                    raise self.reason_of(cause) from None
                time.sleep(_PAUSE_S)
        for sending in self._open:
            sending.commit()
        self._open = []

    @property
    def is_open(self) -> bool:
        """Return True if events were sent since the last commit."""
        return bool(self._open)

    def abort(self) -> None:
        """Abort the open transaction, because consumers of committed messages wait for its end."""
        if self._open:
            self._open = []
            try:
                self._producer.abort_transaction(_ABORT_S)
            except KafkaException:
                # The next producer of this name aborts it.
                return

    def reason_of(self, error: KafkaError) -> PgReplError:
        """Return the error with which a client error ends the connection."""
        took_s = time.monotonic() - self._began_at if self._open else 0.0
        if error.code() in _FENCED and took_s >= self._timeout_s:
            return self._reasons.refused(
                f"a transaction of the source was not sent within {self._timeout_s:.0f} s"
                f" ({TRANSACTION_TIMEOUT})",
                "set that in the URI, and transaction.max.timeout.ms of the brokers, to more",
            )
        return self._error_of(error)

    def _error_of(self, error: KafkaError) -> PgReplError:
        if error.code() == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return self._reasons.refused(
                "the user may not use the publisher's transactional.id",
                "allow Write and Describe on it: pgrepl.<source>.<publisher>",
            )
        if error.code() == KafkaError.INVALID_TRANSACTION_TIMEOUT:
            return self._reasons.refused(
                f"the brokers allow no {TRANSACTION_TIMEOUT} of {LONGEST_TRANSACTION_MS}, or of what the URI"
                " says",
                "set it in the URI to at most their transaction.max.timeout.ms",
            )
        return self._reasons.error_of(error)
