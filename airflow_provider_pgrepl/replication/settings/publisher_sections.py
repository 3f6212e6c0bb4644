"""The settings of a publisher in a pipeline file, by subject. The text below a field describes it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Literal

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName
from airflow_provider_pgrepl.replication.settings.business_events import (
    FUNCTION,
    FUNCTION_PROBLEM,
    OutboxObject,
    TransformValue,
)
from airflow_provider_pgrepl.replication.settings.mistakes import Fields, Rule
from airflow_provider_pgrepl.replication.settings.publisher_columns import NewName, OfRows
from airflow_provider_pgrepl.replication.settings.rules import (
    ColumnText,
    Hours,
    TablePattern,
    TableText,
    between,
    distinct,
    matching,
)
from airflow_provider_pgrepl.replication.settings.targets import FormatName, TargetName

OnError = Literal["stop_table", "skip_and_record"]
Unrouted = Literal["error", "drop"]
NewColumns = Literal["publish", "stop"]
Unchanged = Literal["mark", "fill", "look_up", "require"]
SubjectNames = Literal["topic", "record", "topic_record"]
_PLACES = re.compile(r"\{route\}|\{type\}")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of an address. Raises ValueError."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ValueError(f"{text!r} is no address")
    return host, int(port)


def _check_metrics(text: str) -> None:
    if text:
        parse_address(text)


def _check_route(text: str) -> None:
    if text and not _PLACES.search(text):
        raise ConfigError(f"{text!r} names neither {{route}} nor {{type}}")


METRICS = Rule(_check_metrics, "as 127.0.0.1:9187")
ROUTE = Rule(_check_route, 'give it as "shop.{route}"')
NewNames = Annotated[dict[ColumnText, NewName], distinct(ColumnName.parse)]
Transforms = Annotated[dict[TableText, TransformValue], distinct(TableName.parse)]
RowsByTable = Annotated[dict[TableText, OfRows], distinct(TableName.parse)]
FUNCTION_OR_NONE = matching(f"({FUNCTION.pattern})?", *FUNCTION_PROBLEM)


@dataclass(frozen=True, kw_only=True)
class Delivery:
    """The target, and the delivery of events to it."""

    target: TargetName
    """`rabbitmq`, `nats` or `kafka`."""
    conn_id: str = ""
    """Airflow connection of the target; the app itself uses `PGREPL_TARGET_URI`. Empty: `pgrepl_<target>`."""
    tables: tuple[TablePattern, ...] | None = None
    """`schema.table` or `schema.*`, by the names that the tables have at the time of the change; `null`: all
    of the pipeline.
    """
    begin: Literal["oldest", "newest"] = "oldest"
    """The start of the first run: the `oldest` change that is kept, or only new changes (`newest`)."""
    on_error: OnError = "stop_table"
    """An event that cannot be created, or that the target rejects for its content: `stop_table` stops the
    events of its table, `skip_and_record` records id, table and reason, and continues.
    """
    max_event_bytes: Annotated[int, between(above=0)] = 16 * 1024 * 1024
    """A larger event is rejected before it is sent. By default RabbitMQ takes 128 MiB at most, 16 MiB since
    4.0. NATS takes its `max_payload`, 1 MiB unless configured; Kafka the topic's `max.message.bytes`, 1 MiB
    unless configured.
    """
    publish_retention_h: Hours = 336.0
    """How long unpublished changes are kept; if it is less than `changelog_retention_h`, that applies."""
    metrics: Annotated[str, METRICS] = ""
    """Address of a Prometheus endpoint, as `127.0.0.1:9187`; it has no password. In creek's format it has
    creek's metrics, too, for the dashboards made for it: `creek_producer_pg_reads`, `…_lsn`,
    `…_pg_behind_time`, `…_pg_behind_bytes`, `…_wal_subscriptions`, `log_messages_total`.
    """


@dataclass(frozen=True, kw_only=True)
class TargetSettings:
    """Settings that one kind of target has."""

    exchange: str = ""
    """RabbitMQ: the exchange. Each publisher needs its own. An existing exchange is used unchanged; a missing
    one is declared as a durable topic exchange. Empty: `pgrepl.<pipeline>`.
    """
    unrouted: Unrouted = "error"
    """RabbitMQ: an event that no queue receives: `error` is as for `on_error`, `drop` counts it and
    continues.
    """
    stream: str = ""
    """NATS, except creek's format: the stream, and the first part of its subjects
    ([below](publishers.md#json-to-nats)). Empty: the pipeline's name.
    """
    topic: str = ""
    """Kafka: the names of the topics; in them, characters that a topic may not have become `_`. Each
    publisher needs its own topics. Empty: `<pipeline>.{schema}.{table}`.
    """
    tombstones: bool = False
    """Kafka: if true, a message without a value follows each message that deletes a row; `topic` must hold
    `{schema}` and `{table}`.
    """
    transactions: bool = False
    """Kafka: if true, the changes of a source transaction are sent in one Kafka transaction
    ([below](publishers.md#transactions-of-kafka)).
    """


@dataclass(frozen=True, kw_only=True)
class FormatSettings:
    """The contents of messages."""

    format: FormatName = "json"
    """The bodies of changes: `json`, [`debezium`](publishers.md#debeziums-format); Kafka also
    [`avro`](publishers.md#avro-with-a-schema-registry), NATS also `creek`, [creek's
    wire](publishers.md#messages-to-nats). Unless given: `json`, for NATS `creek`.
    """
    unchanged: Unchanged = "fill"
    """Large values (TOAST) that an update did not change and the server did not send. `fill` takes them from
    the previous change of the same row, as far as [it is
    remembered](publishers.md#values-that-were-not-sent). `look_up` also reads the others from the lake.
    `mark` names them as missing. `require`, for creek's format, is `look_up`, but an event that still lacks
    a value is an error of its table (`on_error`) instead of having a NULL. Without lake tables nothing is
    looked up, and creek's format accepts only `require`, which is then the default.
    """
    namespace: str = "CREEK"
    """Creek's format: the first part of the streams' names."""
    database: str = ""
    """Creek's format: consumers' name of the source, and the last part of the streams' names; each publisher
    needs its own streams. Format `debezium`: the source's database.
    """
    wire: Literal["v1", "v2"] = "v2"
    """Creek's format: the version of creek's wire. `v2` is creek's since March 2025. `v1` is the previous
    one, with the streams `<namespace>_wal`, `<namespace>_schema` and `<namespace>_snap` for all databases,
    which creek's PostgreSQL consumer reads.
    """
    registry_conn_id: str = ""
    """Format `avro`: Airflow connection of the schema registry (`schema` `http` or `https`; `path` of the
    extra is appended to the port); the app itself uses `PGREPL_REGISTRY_URI`. Empty: `pgrepl_registry`.
    """
    subject_names: SubjectNames = "topic"
    """Format `avro`: Confluent's strategies: `topic` is `<topic>-value`, `record` the record's full name,
    `topic_record` `<topic>-<full name>`.
    """
    source: str = ""
    """The name of the source in Debezium's format and in CloudEvents. Empty: the pipeline's name."""
    schemas: bool = False
    """Debezium's format: if true, each message has its schema."""
    cloudevents: bool = False
    """Not in creek's format: if true, messages also have the headers of
    [CloudEvents](publishers.md#cloudevents).
    """


@dataclass(frozen=True, kw_only=True)
class PublishedColumns:
    """The columns and rows that are published."""

    exclude_columns: tuple[ColumnText, ...] = ()
    """Columns, as `schema.table.column`, that are not sent to the target
    ([Columns](publishers.md#columns)).
    """
    hash_columns: tuple[ColumnText, ...] = ()
    """Columns of which it gets a hash."""
    mask_columns: tuple[ColumnText, ...] = ()
    """Columns of which it gets `***`."""
    rename_columns: NewNames = field(default_factory=dict)
    """The target's names, by column."""
    new_columns: NewColumns = "publish"
    """A column that was added after the publisher began, and that no rule names: it is published, or `stop`s
    the events of its table ([new columns](publishers.md#new-columns)).
    """
    row_filter: RowsByTable = field(default_factory=dict)
    """Not in creek's format: by table, the [rows](publishers.md#rows) that are sent to the target."""
    salt_conn_id: str = ""
    """Airflow connection whose password is part of each hash; the app itself uses `PGREPL_HASH_SALT`."""


@dataclass(frozen=True, kw_only=True)
class BusinessEventSettings:
    """Business events instead of changes."""

    outbox: OutboxObject = field(default_factory=dict)
    """An insert-only table whose rows are events."""
    transform: Transforms = field(default_factory=dict)
    """By table, a mapping or a function that makes events of its changes."""
    transform_transaction: Annotated[str, FUNCTION_OR_NONE] = ""
    """A function that makes events of whole transactions
    ([below](business-events.md#function-of-a-transaction)).
    """
    transaction_changes: Annotated[int, between(above=0)] = 100_000
    """The maximum number of changes in a transaction that is passed to that function."""
    messages: tuple[str, ...] = ()
    """Prefixes of [logical messages](messages.md) that are events; `["*"]` for all."""
    route: Annotated[str, ROUTE] = ""
    """The template that makes topic, routing key or subject from an event's route and type. Empty:
    `<pipeline>.{route}` at Kafka, `{route}.{type}` at RabbitMQ and NATS (after the stream's name).
    """


@dataclass(frozen=True, kw_only=True)
class PublisherFile(Delivery, TargetSettings, FormatSettings, PublishedColumns, BusinessEventSettings):
    """An object in `publishers`."""


PUBLISHER_FIELDS = Fields(PublisherFile, "publishers")
