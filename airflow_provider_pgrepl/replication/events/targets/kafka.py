"""The target Kafka: a producer, the conversion of events to messages, and the schema registry, in which
consumers look up the schemas of messages by number.
"""

from __future__ import annotations

import logging
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient
from confluent_kafka.schema_registry.error import SchemaRegistryError

from airflow_provider_pgrepl.errors import PgReplError, TargetError, TargetUnavailableError, one_line
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.avro import AvroEvent, ChangeSchema
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json_object
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.publisher_sections import SubjectNames
from airflow_provider_pgrepl.replication.settings.targets import FORMATS
from airflow_provider_pgrepl.trace import log_unexpected

from .base import KAFKA_PREFIX, LinkedTarget, PendingEvents, Refusal, attributes, topic
from .kafka_broker import (
    OF_ANOTHER,
    TOO_LARGE,
    TRANSACTION_TIMEOUT,
    KafkaReasons,
    KafkaTransactions,
    Topics,
    UnusableTopicError,
    of_admin,
    of_producer,
    properties_of,
    property_error,
    reason_of_topic,
)

log = logging.getLogger(__name__)
client_log = logging.getLogger("confluent_kafka")

_REGISTERED = b"\0"
"""The first byte of a message whose schema has a number in the registry."""
_REGISTRY_S = 10.0
_MOST_SCHEMAS = 10_000
_LOGIN, _NEVER = (401, 403), (404, 409, 422)
"""The registry's statuses for a refused login, and for a schema that it never takes."""
Headers = list[tuple[str, str | bytes | None]]
_NEW_KEY, _OLD_KEY = "__debezium.newkey", "__debezium.oldkey"
"""The headers by which consumers of Debezium join a deletion and an insertion to a change of a row's key.

https://debezium.io/documentation/reference/stable/connectors/postgresql.html#postgresql-primary-key-updates
"""
_BY_ITS_KEY = -1
"""The constant RD_KAFKA_PARTITION_UA of librdkafka."""
_CONNECT_S, _TRY_S, _CLOSE_S, _POLL_S, _FULL_S = 20.0, 2.0, 10.0, 0.2, 0.02
_Delivered = Callable[[KafkaError | None, Any], None]


class RefusedSchemaError(Exception):
    """The registry permanently rejects a schema. The text says why."""


class SchemaRegistry:
    """A registry with the interface of Confluent's.

    `uri`: `http(s)://user:password@host:port/path`; it is never logged. Raises TargetError for an invalid
    URI.
    """

    def __init__(self, uri: str, names: SubjectNames) -> None:
        configuration = _registry_configuration(uri)
        self._client, self._names = SchemaRegistryClient(configuration), names
        self._where = f"the schema registry at {configuration['url']}"
        self._known: dict[tuple[str, str], bytes] = {}

    def prefix(self, schema: ChangeSchema, topic: str) -> bytes:
        """Return the bytes before a body: the number under which the schema is registered for the topic.

        Raises RefusedSchemaError, TargetError if the login is refused, TargetUnavailableError.
        """
        subject = self._subject(schema, topic)
        known = subject, schema.text
        if known not in self._known:
            if len(self._known) >= _MOST_SCHEMAS:
                self._known.clear()
            self._known[known] = _REGISTERED + struct.pack(">I", self._register(subject, schema.text))
        return self._known[known]

    def _subject(self, schema: ChangeSchema, topic: str) -> str:
        if self._names == "record":
            return schema.name
        return f"{topic}-value" if self._names == "topic" else f"{topic}-{schema.name}"

    def _register(self, subject: str, text: str) -> int:
        try:
            return self._client.register_schema(subject, Schema(text, "AVRO"))
        except SchemaRegistryError as error:
            status, said = error.http_status_code, one_line(error.error_message or "")
        except Exception as error:  # noqa: BLE001 - its HTTP client's, of many kinds; they may show the URI
            log_unexpected(log, f"asking {self._where}", error, logging.WARNING)
            status, said = 0, type(error).__name__
        if status in _NEVER:
            raise RefusedSchemaError(f"subject {subject}: {self._where} refuses the schema: {said}")
        if status in _LOGIN:
            raise TargetError(
                f"{self._where}: the login was refused, or may not register schemas",
                "look at the registry's connection, and at the rights of its user",
            )
        raise TargetUnavailableError(
            f"{self._where} does not answer: {said}",
            "check that the registry runs. Events wait in the changelog until then",
        )


def _registry_configuration(uri: str) -> dict[str, object]:
    try:
        parts = urlsplit(uri)
        readable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        readable = False
    if not readable:
        raise TargetError(
            "the URI of the schema registry cannot be read",
            "give it as http://host:8081 or https://user:password@host; what is special in a password is"
            " percent-encoded",
        )
    login, _, place = parts.netloc.rpartition("@")
    found: dict[str, object] = {
        "url": urlunsplit((parts.scheme, place, parts.path, "", "")),
        "timeout": _REGISTRY_S,
        "max.retries": 0,
    }
    if login:
        user, _, password = login.partition(":")
        found["basic.auth.user.info"] = f"{unquote(user)}:{unquote(password)}"
    return found


class KafkaMessage(NamedTuple):
    """One message. Its key determines the partition, unless `partition` is set."""

    key: bytes | None
    body: bytes | None
    headers: Headers
    partition: int = _BY_ITS_KEY


def messages_of(
    event: Event,
    settings: PublisherSettings,
    partitions: Callable[[], Sequence[int]],
    prefix: bytes = b"",
) -> list[KafkaMessage]:
    """Return the messages of an event: one, or more for a changed key, a TRUNCATE, or tombstones.

    `partitions`: returns the partitions of the topic. `prefix`: put before each body.
    """
    one = KafkaMessage(event.key or table_key(event.table), prefix + event.body, _headers(event, settings))
    if event.business is not None:
        return [one]
    if event.key is None and FORMATS[settings.format].has_debezium_keys:
        # Debezium's sinks reject a key without a schema. Using a single partition keeps the order.
        one = one._replace(key=None, partition=0)
    if event.op == "truncate":
        return [one._replace(partition=number) for number in partitions()]
    found, gone = [one], event.key if event.op == "delete" else None
    if event.left is not None:
        gone, body = event.left
        left = _headers(replace(event, id=f"{event.id}:old", op="delete"), settings)
        if FORMATS[settings.format].has_debezium_keys:
            left.append((_NEW_KEY, event.key))
            one.headers.append((_OLD_KEY, gone))
        found.insert(0, KafkaMessage(gone, prefix + body, left))
    if gone and settings.tombstones:
        found.insert(1, KafkaMessage(gone, None, one.headers[1:2]))
    return found


@lru_cache(10_000)
def table_key(table: str) -> bytes:
    """Return the key of all messages of a table whose rows have no key."""
    return to_json_object({"table": table}).encode()


def _headers(event: Event, settings: PublisherSettings) -> Headers:
    """Return the headers of the event's main message."""
    found: Headers = [("id", event.id), ("generation", str(event.generation))]
    said = event.business
    if said is None:
        found.append(("op", event.op))
    else:
        found += [("type", said.type), ("content-type", said.content_type)]
        found += said.headers.items()
    if settings.cloudevents:
        found += [(f"{KAFKA_PREFIX}{name}", value) for name, value in attributes(event, settings).items()]
        found += [("content-type", "application/json")] if said is None else []
    return found


class _All:
    """Calls `tell` once for all messages of an event: after all were delivered, or after one failed."""

    def __init__(self, count: int, tell: _Delivered) -> None:
        self._left, self._tell = count, tell
        self._lock = threading.Lock()

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        with self._lock:
            if error is not None and self._left > 0:
                self._left = 1
            self._left -= 1
            is_last = self._left == 0
        if is_last:
            self._tell(error, message)


class KafkaLink:
    """A producer's connection.

    The publisher's thread calls `send`; another thread polls for delivery reports.
    """

    def __init__(
        self,
        properties: Mapping[str, Any],
        settings: PublisherSettings,
        refused: dict[str, str],
        registry: SchemaRegistry | None,
        *,
        one_by_one: bool,
    ) -> None:
        """`refused`: the reasons of refused events, by id, whose transaction had to be restarted."""
        self._settings, self._refused, self._registry = settings, refused, registry
        self._properties = of_producer(properties, settings, one_by_one=one_by_one)
        self._reasons = KafkaReasons(self._properties)
        self._transactions: KafkaTransactions | None = None
        self.is_one_by_one = one_by_one
        self.met_large = False
        """True if a batch was rejected, possibly because of a single message in it."""
        self._has_found = False
        self._error: PgReplError | None = None
        self._is_stopping = False
        self._sendings: dict[int, PendingEvents] = {}
        self._lock = threading.Lock()

    def start(self) -> None:
        """Connect, and start the polling thread.

        Raises TargetUnavailableError if no broker answers, and TargetError if the login is refused or
        librdkafka rejects a property.
        """
        try:
            self._producer = Producer({**self._properties, "error_cb": self._said}, logger=client_log)
            admin = AdminClient(of_admin(self._properties), logger=client_log)
        except (KafkaException, TypeError, ValueError, AttributeError) as error:
            raise property_error(error, self._properties) from None
        self._topics = Topics(self._settings, self._producer, admin, self._reasons)
        try:
            self._wait_for_brokers()
            if self._settings.transactions:
                timeout_ms = int(self._properties[TRANSACTION_TIMEOUT])
                self._transactions = KafkaTransactions(self._producer, timeout_ms, self._reasons)
                self._transactions.begin()
        except BaseException:
            self._release()
            raise
        self._thread = threading.Thread(target=self._hear, name="pgrepl-kafka", daemon=True)
        self._thread.start()

    def _wait_for_brokers(self) -> None:
        deadline = time.monotonic() + _CONNECT_S
        while True:
            try:
                self._producer.list_topics(timeout=_TRY_S)
                return
            except KafkaException as error:
                # The error callback, called by poll, has a more specific reason than the timeout.
                self._producer.poll(0)
                if self._error is not None or time.monotonic() > deadline:
                    raise self._error or self._reasons.error_of(error.args[0]) from None

    @property
    def is_open(self) -> bool:
        return self._error is None

    def stop(self) -> None:
        """Abort the open transaction and close the connection; unacknowledged events fail."""
        if self._transactions is not None and self._error is None:
            self._transactions.abort()
        self._is_stopping = True
        self._thread.join(_CLOSE_S)
        self._release()

    def _release(self) -> None:
        """Delete the references between producer and link: they would keep the producer's threads alive."""
        del self._producer, self._topics
        self._transactions = None

    # --- the publisher's thread ---

    def send(self, sending: PendingEvents) -> None:
        """Pass the events to the client. Blocks while its buffer is full."""
        with self._lock:
            if sending.events and self._error is None:
                self._sendings[id(sending)] = sending
        if self._has_found:
            self._fail(self._reasons.away("messages are sent in batches again"))
        try:
            if self._transactions is not None:
                if self._transactions.is_whole:
                    self.commit()
                if self._error is None:
                    self._transactions.take(sending)
            for index, event in enumerate(sending.events):
                if self._error is not None:
                    break
                self._send(sending, index, event)
        except PgReplError as error:
            self._fail(error)
        if self._error is not None:
            sending.fail(self._error)

    def commit(self) -> None:
        """Commit the open transaction, if any, after all of its messages are delivered."""
        transactions = self._transactions
        if transactions is not None and transactions.is_open and self._error is None:
            try:
                transactions.commit()
            except PgReplError as error:
                self._fail(error)
            else:
                self._refused.clear()
                with self._lock:
                    self._sendings = {key: one for key, one in self._sendings.items() if not one.is_done}

    def _send(self, sending: PendingEvents, index: int, event: Event) -> None:
        if event.id in self._refused:
            self._settle(sending, index, Refusal(event, self._refused[event.id]))
            return
        try:
            name = self._topics.find(event)
            prefix = self._prefix(event, name)
        except (UnusableTopicError, RefusedSchemaError) as error:
            self._settle(sending, index, Refusal(event, str(error)))
            return
        largest = len(event.body) if event.left is None else max(len(event.body), len(event.left[1]))
        if largest > self._settings.max_event_bytes:
            reason = f"the event has {largest:,} bytes, and max_event_bytes is less"
            self._settle(sending, index, Refusal(event, reason))
            return
        delivered: _Delivered = partial(self._delivered, sending, index)
        messages = messages_of(event, self._settings, lambda: self._topics.partitions(name), prefix)
        if len(messages) > 1:
            delivered = _All(len(messages), delivered)
        timestamp = 0 if event.commit_ts is None else int(event.commit_ts.timestamp() * 1_000)
        for message in messages:
            self._produce(name, message, timestamp, delivered)

    def _prefix(self, event: Event, topic: str) -> bytes:
        """Return the bytes before the body that identify its schema for consumers."""
        if self._registry is None or not isinstance(event, AvroEvent):
            return b""
        return self._registry.prefix(event.schema, topic)

    def _produce(self, topic: str, message: KafkaMessage, timestamp: int, delivered: _Delivered) -> None:
        key, body, headers, partition = message
        while self._error is None:
            try:
                self._producer.produce(
                    topic, body, key, partition, on_delivery=delivered, timestamp=timestamp, headers=headers
                )
                return
            except BufferError:
                # The other thread polls for delivery reports, which empties the buffer.
                time.sleep(_FULL_S)
            except KafkaException as error:
                delivered(error.args[0], None)
                return

    # --- what becomes of messages ---

    def _hear(self) -> None:
        producer = self._producer
        try:
            while self._error is None and not self._is_stopping:
                producer.poll(_POLL_S)
        except KafkaException as error:
            # The error is fatal.
            self._fail(self._reason(error.args[0]))
        except Exception as error:
            log_unexpected(log, "hearing from Kafka", error)
            raise
        finally:
            self._fail(self._reasons.away("the connection was closed"))
            producer.purge(blocking=False)
            producer.poll(0)

    def _delivered(self, sending: PendingEvents, index: int, error: KafkaError | None, _: Any) -> None:
        refusal = None
        if error is not None:
            event = sending.events[index]
            reason = self._reason_to_refuse(error, topic(event, self._settings))
            if not reason:
                self._fail(self._reason(error))
                return
            if self._transactions is not None:
                # A failed message ends its transaction.
                self._refused[event.id] = reason
                self._fail(
                    self._reasons.away("what was not taken is left out, and its transaction sent again")
                )
                return
            refusal = Refusal(event, reason)
        self._settle(sending, index, refusal)

    def _settle(self, sending: PendingEvents, index: int, refusal: Refusal | None) -> None:
        """Settle an event; both threads call this.

        After the producer has failed, events are not settled but sent again.
        """
        with self._lock:
            if self._error is None:
                sending.settle(index, refusal)
                if sending.is_done:
                    self._sendings.pop(id(sending), None)

    def _reason_to_refuse(self, error: KafkaError, topic: str) -> str:
        is_too_large = error.code() in TOO_LARGE
        if (is_too_large or error.code() in OF_ANOTHER) and not self.is_one_by_one:
            # The broker rejects whole batches. The message at fault is found by sending each one alone.
            self.met_large = True
            return ""
        # Later messages can be sent in batches again.
        self._has_found = self.is_one_by_one
        if is_too_large:
            return f"topic {topic}: the event is larger than it takes (max.message.bytes)"
        return reason_of_topic(error, topic)

    def _said(self, error: KafkaError) -> None:
        """Handle an error that the client reports in `poll`.

        Ignores unavailable brokers, to which the client reconnects.
        """
        found = self._reason(error)
        if error.fatal() or not isinstance(found, TargetUnavailableError):
            self._fail(found)

    def _reason(self, error: KafkaError) -> PgReplError:
        transactions = self._transactions
        return self._reasons.error_of(error) if transactions is None else transactions.reason_of(error)

    def _fail(self, error: PgReplError) -> None:
        """Fail all sendings. Only the first error is kept and reported."""
        with self._lock:
            self._error = self._error or error
            lost = [*self._sendings.values()]
            self._sendings.clear()
        for sending in lost:
            sending.fail(self._error)


class Kafka(LinkedTarget[KafkaLink]):
    """A producer.

    `uri`: `kafka://user:password@host:port,host:port?property=value`, or `kafkas://` with TLS. The properties
    are those of librdkafka. It is never logged. Raises TargetError for an invalid URI.
    """

    def __init__(self, uri: str, settings: PublisherSettings, registry: str = "") -> None:
        """`registry`: the URI of a schema registry, for a format that needs one."""
        self._properties, self._settings = properties_of(uri), settings
        super().__init__(KafkaReasons(self._properties).where)
        self._registry = SchemaRegistry(registry, settings.subject_names) if registry else None
        self.keeps_transactions = settings.transactions
        self._refused: dict[str, str] = {}
        self._one_by_one = False

    def connect(self) -> None:
        """Connect, or connect again.

        Raises TargetUnavailableError, and TargetError if the login or a certificate is refused.
        """
        if self._link is not None:
            self._one_by_one = self._link.met_large
        self.close()
        link = KafkaLink(
            self._properties, self._settings, self._refused, self._registry, one_by_one=self._one_by_one
        )
        link.start()
        self._link = link

    def commit(self) -> None:
        if self._link is not None:
            self._link.commit()
