"""The properties of the brokers (TARGETS) and of the message formats (FORMATS) of publishers.

A new broker or format needs an entry here and its own module: no other code compares their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from airflow_provider_pgrepl import errors

from .mistakes import Mistake

if TYPE_CHECKING:
    from .publisher import PublisherSettings

TargetName = Literal["rabbitmq", "nats", "kafka"]
FormatName = Literal["json", "debezium", "avro", "creek"]
SHORT_TEXT_BYTES = 255
"""The maximum number of bytes of an AMQP name (AMQP 0-9-1, 4.2.5.3)."""
_REFERENCE = errors.reference("publishers")
_STREAM_WORD = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Part of a JetStream stream's name. The server allows slightly more."""
_STREAM_RULE = "may hold only A-Z, a-z, 0-9, _ and -, at most 100 of them"
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True)
class TargetKind:
    """A kind of broker. Its name in TARGETS is also the extra of this package that installs its client.

    - `title`: the class in `module`, which is below `events/targets`.
    - `client`: the required package. `logger`: the name of its logger.
    - `place`: the function of `events/targets/base` that returns an event's destination.
    - `schemes`: the schemes of URIs and connections, without TLS and with TLS.
    - `default_login`: login and password of a broker with its initial configuration.
    - `formats`: the supported formats; the first is the default.
    - `settings`: those that not every target has. `defaults`: their defaults, by the pipeline's name.
    - `place_of`: the destination of a publisher's events, for messages. No two publishers may share one.
    - `is_keyed`: messages have keys.
    - `has_hosts`: a connection may name several hosts, and keys of its extra that contain a dot are
      properties of the client.
    - `has_virtual_hosts`: the connection's schema is the virtual host.
    """

    title: str
    module: str
    client: str
    logger: str
    place: str
    schemes: tuple[str, str]
    formats: tuple[FormatName, ...]
    settings: tuple[str, ...]
    defaults: Callable[[str], Mapping[str, str]]
    place_of: Callable[[PublisherSettings], str]
    check: Callable[[PublisherSettings], Iterator[Mistake]]
    default_login: str = ""
    is_keyed: bool = False
    has_hosts: bool = False
    has_virtual_hosts: bool = False


@dataclass(frozen=True)
class FormatKind:
    """A format of the messages of changes.

    - `settings`: the settings that no other format has. `excludes`: settings of others that it lacks.
    - `place_of`: as in TargetKind, if the format determines the destination.
    - `has_registry`: its schemas are in a schema registry.
    - `has_snapshots`: consumers may request snapshots. Its only target is JetStream.
    - `has_debezium_keys`: a changed key is published as Debezium does; a row without a key has none.
    - `takes_transactions`: supports `transform_transaction`.
    - `unsent`: the required value of `unchanged` without lake tables; empty if any value is allowed.
    """

    check: Callable[[PublisherSettings], Iterator[Mistake]]
    settings: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    place_of: Callable[[PublisherSettings], str] | None = None
    has_registry: bool = False
    has_snapshots: bool = False
    has_debezium_keys: bool = False
    takes_transactions: bool = False
    unsent: str = ""


def _check_exchange(settings: PublisherSettings) -> Iterator[Mistake]:
    if len(settings.exchange.encode()) > SHORT_TEXT_BYTES:
        yield Mistake(("exchange",), f"is longer than the {SHORT_TEXT_BYTES} bytes that AMQP allows")
    if settings.exchange.startswith("amq."):
        yield Mistake(("exchange",), "names that begin with amq. are the broker's own")


def _check_stream(settings: PublisherSettings) -> Iterator[Mistake]:
    if settings.stream and not _STREAM_WORD.fullmatch(settings.stream):
        yield Mistake(("stream",), _STREAM_RULE)


def _check_topic(settings: PublisherSettings) -> Iterator[Mistake]:
    rest = settings.topic.replace("{schema}", "s").replace("{table}", "t")
    if not _TOPIC.fullmatch(rest):
        yield Mistake(
            ("topic",),
            f"{settings.topic!r} may hold A-Z, a-z, 0-9, ., _, -, {{schema}} and {{table}}",
            'as "shop.{schema}.{table}"',
        )
    if settings.tombstones and not ("{schema}" in settings.topic and "{table}" in settings.topic):
        yield Mistake(
            ("tombstones",),
            "several tables would share a topic, and rows of one delete another's",
            "have topic hold {schema} and {table}",
        )


def _check_no_database(settings: PublisherSettings) -> Iterator[Mistake]:
    for name in ("database", "schemas"):
        if getattr(settings, name):
            yield Mistake((name,), "is of format debezium", _REFERENCE)


def _check_debezium(settings: PublisherSettings) -> Iterator[Mistake]:
    if not settings.database:
        yield Mistake(("database",), "is missing", "name that of the source: it is part of each event")


def _check_creek(settings: PublisherSettings) -> Iterator[Mistake]:
    if not settings.database:
        yield Mistake(
            ("database",),
            "is missing",
            "give the name by which consumers know the source; it is part of the streams' names",
        )
    for key in ("namespace", "database"):
        if (key != "database" or settings.database) and not _STREAM_WORD.fullmatch(getattr(settings, key)):
            yield Mistake((key,), _STREAM_RULE)


def _creek_place(settings: PublisherSettings) -> str:
    if settings.wire == "v1":
        return f"the subjects {settings.namespace}.{settings.database}.*"
    return f"the streams {settings.namespace}_*_{settings.database}"


_ROUTE = "{route}.{type}"
TARGETS: Mapping[TargetName, TargetKind] = {
    "rabbitmq": TargetKind(
        title="RabbitMQ",
        module="rabbitmq",
        client="pika",
        logger="pika",
        place="routing_key",
        schemes=("amqp", "amqps"),
        default_login="guest",
        formats=("json", "debezium"),
        settings=("exchange", "unrouted"),
        defaults=lambda pipeline: {"exchange": f"pgrepl.{pipeline}", "route": _ROUTE},
        place_of=lambda settings: f"exchange {settings.exchange}",
        check=_check_exchange,
        has_virtual_hosts=True,
    ),
    "nats": TargetKind(
        title="JetStream",
        module="jetstream",
        client="nats-py",
        logger="nats",
        place="subject",
        schemes=("nats", "tls"),
        formats=("creek", "json", "debezium"),
        settings=("namespace", "wire", "stream"),
        defaults=lambda pipeline: {"stream": pipeline, "route": _ROUTE},
        place_of=lambda settings: f"the stream {settings.stream}",
        check=_check_stream,
    ),
    "kafka": TargetKind(
        title="Kafka",
        module="kafka",
        client="confluent-kafka",
        logger="confluent_kafka",
        place="topic",
        schemes=("kafka", "kafkas"),
        formats=("json", "debezium", "avro"),
        settings=("topic", "tombstones", "transactions", "registry_conn_id", "subject_names"),
        defaults=lambda pipeline: {
            "topic": f"{pipeline}.{{schema}}.{{table}}",
            "route": f"{pipeline}.{{route}}",
            "registry_conn_id": "pgrepl_registry",
        },
        place_of=lambda settings: f"the topics {settings.topic}",
        check=_check_topic,
        is_keyed=True,
        has_hosts=True,
    ),
}
FORMATS: Mapping[FormatName, FormatKind] = {
    "json": FormatKind(check=_check_no_database, takes_transactions=True),
    "debezium": FormatKind(check=_check_debezium, has_debezium_keys=True),
    "avro": FormatKind(check=_check_no_database, has_registry=True),
    "creek": FormatKind(
        check=_check_creek,
        settings=("namespace", "wire"),
        excludes=(
            *("stream", "outbox", "transform", "transform_transaction", "transaction_changes", "messages"),
            *("route", "source", "schemas", "cloudevents", "row_filter"),
        ),
        place_of=_creek_place,
        has_snapshots=True,
        unsent="require",
    ),
}
