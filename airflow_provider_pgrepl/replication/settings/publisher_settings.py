"""PublisherSettings: what a pipeline file says of one publisher of change events."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.business_events import Rule, parse_rules
from airflow_provider_pgrepl.replication.settings.publisher_columns import ColumnRules
from airflow_provider_pgrepl.replication.settings.row_filter import RowFilter

TargetKind = Literal["rabbitmq", "nats", "kafka"]
OnError = Literal["stop_table", "skip_and_record"]
Unrouted = Literal["error", "drop"]
NewColumns = Literal["publish", "stop"]
Unchanged = Literal["mark", "fill", "look_up", "require"]
"""What becomes of a large value that an update left alone and the server did not send: it is said to be
missing; is filled from the change before; or else looked up in the lake."""
Format = Literal["json", "debezium", "avro", "creek"]
SubjectNames = Literal["topic", "record", "topic_record"]
"""Of Confluent's strategies: by the topic, by the record's name, or by both."""

SHORT_TEXT_BYTES = 255
"""Bytes that an AMQP name may have (AMQP 0-9-1, 4.2.5.3)."""


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """One publisher, as `parse_publisher` reads it.

    `conn_id`: the Airflow connection of the target. `tables`: as `schema.name` or `schema.*`; None is all
    of the pipeline. `exchange`, of RabbitMQ: `pgrepl.<pipeline>` unless named. `stream`, of NATS: the
    pipeline's name unless named; in creek's format `namespace` and `database` are what its streams are called
    by, and `wire` is the version of creek's wire. `topic`, of Kafka: what
    each table's is called, `<pipeline>.{schema}.{table}` unless named; `tombstones`: whether a delete is
    followed by one; `transactions`: whether what a transaction of the source changed is one of Kafka's, too.
    `begin`: where the first run begins, `oldest` or `newest`. `on_error`: what becomes of
    a table when an event of it cannot be made, or the target refuses it for what it is. `unchanged`: what
    becomes of large values that an update left alone, and the server did not send. `unrouted`: whether
    an event that no queue takes is such an error, or is dropped. `max_event_bytes`: what the target takes
    at most. `publish_keep_h`: for how long changes that are not published are kept. `metrics`: `host:port`
    of a Prometheus endpoint. `exclude_columns`, `hash_columns`, `mask_columns`, `rename_columns`: as
    ColumnRules has them; `new_columns`: whether a column that came after the publisher began, and that none
    of these names, is published or stops its table; `row_filter`: of which rows it tells, as RowFilter has
    it; `salt_conn_id`: the Airflow connection whose password goes into each hash.
    `outbox`, `transform`: which tables' changes become business events, as `business_settings` has them;
    `transform_transaction`: a function that makes events of whole transactions, of `transaction_changes` each
    at most; `messages`: of which prefixes logical messages are events; `route`: how topics or routing keys of
    business events are made of their `{route}` and `{type}`. `format`: of the bodies of changes, `creek` at
    NATS and `json` elsewhere unless named; with `debezium`, `database` is the source's, and `schemas` says
    whether each message carries its schema; with `avro`, `registry_conn_id` is the Airflow connection of the
    schema registry, `pgrepl_registry` unless named, and `subject_names` how its subjects are called.
    `cloudevents`: whether headers are those of CloudEvents, too. `source`: what all these call the source,
    `<pipeline>` unless named.
    """

    name: str
    target: TargetKind
    conn_id: str = ""
    tables: tuple[str, ...] | None = None
    exchange: str = ""
    stream: str = ""
    namespace: str = "CREEK"
    database: str = ""
    wire: Literal["v1", "v2"] = "v2"
    topic: str = ""
    tombstones: bool = False
    transactions: bool = False
    begin: Literal["oldest", "newest"] = "oldest"
    on_error: OnError = "stop_table"
    unchanged: Unchanged = "fill"
    unrouted: Unrouted = "error"
    max_event_bytes: int = 16 * 1024 * 1024
    publish_keep_h: float = 336.0
    metrics: str = ""
    exclude_columns: tuple[str, ...] = ()
    hash_columns: tuple[str, ...] = ()
    mask_columns: tuple[str, ...] = ()
    new_columns: NewColumns = "publish"
    rename_columns: dict[str, str] = field(default_factory=dict)
    row_filter: dict[str, Any] = field(default_factory=dict)
    salt_conn_id: str = ""
    outbox: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)
    transform_transaction: str = ""
    transaction_changes: int = 100_000
    messages: tuple[str, ...] = ()
    route: str = ""
    format: Format = "json"
    registry_conn_id: str = ""
    subject_names: SubjectNames = "topic"
    source: str = ""
    schemas: bool = False
    cloudevents: bool = False

    @property
    def whole(self) -> int | None:
        """Of how many changes transactions may be that are read as a whole; None: they need not be."""
        return self.transaction_changes if self.transform_transaction else None

    @property
    def place(self) -> str:
        """Where at its target it sends events: no two publishers to one place."""
        if self.target == "nats" and self.format != "creek":
            return f"the stream {self.stream}"
        if self.target == "nats":
            if self.wire == "v1":
                return f"the subjects {self.namespace}.{self.database}.*"
            return f"the streams {self.namespace}_*_{self.database}"
        if self.target == "kafka":
            return f"the topics {self.topic}"
        return f"exchange {self.exchange}"

    @property
    def full_place(self) -> str:
        """The same, with the kind of its target."""
        return f"{self.target}: {self.place}"

    @cached_property
    def column_rules(self) -> ColumnRules:
        """What becomes of which columns. Raises ConfigError."""
        return ColumnRules.parse(
            self.exclude_columns, self.hash_columns, self.mask_columns, self.rename_columns
        )

    @cached_property
    def rows(self) -> RowFilter:
        """Of which rows its target is told. Raises ConfigError."""
        return RowFilter.parse(self.row_filter)

    @cached_property
    def rules(self) -> dict[TableName, Rule]:
        """What becomes of which table's changes instead of events of them. Raises ConfigError."""
        return parse_rules(self.outbox, self.transform)

    def metrics_address(self) -> tuple[str, int]:
        """Host and port of the Prometheus endpoint. Raises ConfigError."""
        host, colon, port = self.metrics.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(
                f"publishers: {self.name}: metrics: {self.metrics!r} is no address", "as 127.0.0.1:9187"
            )
        return host, int(port)
