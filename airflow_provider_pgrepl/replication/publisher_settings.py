"""PublisherSettings: what a pipeline file says of one publisher of change events."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.business_settings import FUNCTION, Rule, parse_rules
from airflow_provider_pgrepl.replication.column_rules import ColumnRules
from airflow_provider_pgrepl.replication.names import TableName
from airflow_provider_pgrepl.replication.setting_types import describe, is_of

TargetKind = Literal["rabbitmq", "nats", "kafka"]
OnError = Literal["stop_table", "skip_and_record"]
Unrouted = Literal["error", "drop"]
Unchanged = Literal["mark", "fill", "look_up"]
"""What becomes of a large value that an update left alone and the server did not send: it is said to be
missing; is filled from the change before; or else looked up in the lake."""
SubjectNames = Literal["topic", "record", "topic_record"]
"""Of Confluent's strategies: by the topic, by the record's name, or by both."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,39}")
SHORT_TEXT_BYTES = 255
"""Bytes that an AMQP name may have (AMQP 0-9-1, 4.2.5.3)."""
_SOME_TEXTS = tuple[str, ...] | None
_REFERENCE = hints.reference("publishers")
_ONLY_OF = {
    "exchange": "rabbitmq",
    "unrouted": "rabbitmq",
    "namespace": "nats",
    "wire": "nats",
    "topic": "kafka",
    "tombstones": "kafka",
    "transactions": "kafka",
    "registry_conn_id": "kafka",
    "subject_names": "kafka",
    **dict.fromkeys(
        ("outbox", "transform", "messages", "route", "format", "source", "schemas", "cloudevents"),
        "rabbitmq or kafka",
    ),
    **dict.fromkeys(("transform_transaction", "transaction_changes"), "rabbitmq or kafka"),
}
"""Which target a setting is of, where it is not of all."""
_STREAM_WORD = re.compile(r"[A-Za-z0-9_-]{1,100}")
"""Of what a JetStream stream's name may be made, and a bit less than the server allows."""
_PLACES = re.compile(r"\{route\}|\{type\}")
_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """One publisher. Raises ConfigError naming the field.

    `conn_id`: the Airflow connection of the target. `tables`: as `schema.name` or `schema.*`; None is all
    of the pipeline. `exchange`, of RabbitMQ: `pgrepl.<pipeline>` unless named. `namespace` and `database`,
    of NATS: what its streams are called by; `wire`: the version of creek's wire. `topic`, of Kafka: what
    each table's is called, `<pipeline>.{schema}.{table}` unless named; `tombstones`: whether a delete is
    followed by one; `transactions`: whether what a transaction of the source changed is one of Kafka's, too.
    `begin`: where the first run begins, `oldest` or `newest`. `on_error`: what becomes of
    a table when an event of it cannot be made, or the target refuses it for what it is. `unchanged`: what
    becomes of large values that an update left alone, and the server did not send. `unrouted`: whether
    an event that no queue takes is such an error, or is dropped. `max_event_bytes`: what the target takes
    at most. `publish_keep_h`: for how long changes that are not published are kept. `metrics`: `host:port`
    of a Prometheus endpoint. `exclude_columns`, `hash_columns`, `mask_columns`, `rename_columns`: as
    ColumnRules has them; `salt_conn_id`: the Airflow connection whose password goes into each hash.
    `outbox`, `transform`: which tables' changes become business events, as `business_settings` has them;
    `transform_transaction`: a function that makes events of whole transactions, of `transaction_changes` each
    at most; `messages`: of which prefixes logical messages are events; `route`: how topics or routing keys of
    business events are made of their `{route}` and `{type}`. `format`: of the bodies of changes, where the
    target does not say it; with `debezium`, `database` is the source's, and `schemas` says whether each
    message carries its schema; with `avro`, `registry_conn_id` is the Airflow connection of the schema
    registry, `pgrepl_registry` unless named, and `subject_names` how its subjects are called.
    `cloudevents`: whether headers are those of CloudEvents, too. `source`: what all these call the source,
    `<pipeline>` unless named.
    """

    name: str
    target: TargetKind
    conn_id: str = ""
    tables: tuple[str, ...] | None = None
    exchange: str = ""
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
    rename_columns: dict[str, str] = field(default_factory=dict)
    salt_conn_id: str = ""
    outbox: dict[str, Any] = field(default_factory=dict)
    transform: dict[str, Any] = field(default_factory=dict)
    transform_transaction: str = ""
    transaction_changes: int = 100_000
    messages: tuple[str, ...] = ()
    route: str = ""
    format: Literal["json", "debezium", "avro"] = "json"
    registry_conn_id: str = ""
    subject_names: SubjectNames = "topic"
    source: str = ""
    schemas: bool = False
    cloudevents: bool = False

    @classmethod
    def of(cls, pipeline: str, name: str, given: object) -> PublisherSettings:
        """Of the entry `name` in a pipeline file's `publishers`. Raises ConfigError."""
        where = f"publishers: {name}"
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"publishers: {name!r} may hold only a-z, 0-9 and _, at most 40 of them, and not begin with _"
            )
        if not isinstance(given, dict):
            raise ConfigError(f"{where} must be an object", _REFERENCE)
        types = get_type_hints(cls)
        known = [field.name for field in dataclasses.fields(cls) if field.name != "name"]
        if unknown := sorted(set(given) - set(known)):
            raise ConfigError(
                f"{where} has unknown key {', '.join(map(repr, unknown))}", hints.known_keys(unknown, known)
            )
        if "target" not in given:
            raise ConfigError(
                f"{where} has no target", f"one of {', '.join(map(repr, get_args(TargetKind)))}"
            )
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
        }
        for key, value in values.items():
            _check(f"{where}: {key}", value, types[key])
        for key, target in _ONLY_OF.items():
            if key in values and values["target"] not in target.split(" or "):
                targets = " or ".join(map(repr, target.split(" or ")))
                raise ConfigError(f"{where}: {key}: is of target {targets} alone", _REFERENCE)
        defaults = {"conn_id": f"pgrepl_{values['target']}", "source": pipeline}
        if values["target"] == "rabbitmq":
            defaults |= {"exchange": f"pgrepl.{pipeline}", "route": "{route}.{type}"}
        if values["target"] == "kafka":
            defaults |= {"topic": f"{pipeline}.{{schema}}.{{table}}", "route": f"{pipeline}.{{route}}"}
            defaults["registry_conn_id"] = "pgrepl_registry"
        named = {key: value for key, value in values.items() if value != "" or key not in defaults}
        fields: dict[str, Any] = {**defaults, **named, "name": name}
        found = cls(**fields)
        found._check_values(where)
        return found

    @property
    def whole(self) -> int | None:
        """Of how many changes transactions may be that are read as a whole; None: they need not be."""
        return self.transaction_changes if self.transform_transaction else None

    @property
    def place(self) -> str:
        """Where at its target it sends events: no two publishers to one place."""
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
    def rules(self) -> dict[TableName, Rule]:
        """What becomes of which table's changes instead of events of them. Raises ConfigError."""
        return parse_rules(self.outbox, self.transform)

    def _check_values(self, where: str) -> None:
        try:
            _ = self.column_rules, self.rules
        except ConfigError as error:
            raise ConfigError(f"{where}: {error.message}", error.hint) from None
        self._check_numbers(where)
        if len(self.exchange.encode()) > SHORT_TEXT_BYTES:
            raise ConfigError(
                f"{where}: exchange: is longer than the {SHORT_TEXT_BYTES} bytes that AMQP allows"
            )
        if self.exchange.startswith("amq."):
            raise ConfigError(f"{where}: exchange: names that begin with amq. are the broker's own")
        if self.metrics:
            self.metrics_address()
        if self.target == "nats":
            self._check_streams(where)
        elif self.format == "debezium" and not self.database:
            raise ConfigError(f"{where} has no database", "name that of the source: it is part of each event")
        elif self.format != "debezium" and (self.database or self.schemas):
            raise ConfigError(f"{where}: database and schemas are of format debezium", _REFERENCE)
        if self.format == "avro" and self.target != "kafka":
            raise ConfigError(f"{where}: format: avro is of target 'kafka' alone", _REFERENCE)
        if self.target == "kafka":
            self._check_topic(where)
        self._check_business(where)

    def _check_numbers(self, where: str) -> None:
        if self.max_event_bytes <= 0:
            raise ConfigError(f"{where}: max_event_bytes: must be greater than 0")
        if not 0 < self.publish_keep_h <= 876_000:
            raise ConfigError(f"{where}: publish_keep_h: must be greater than 0, and not more than 876000")

    def _check_business(self, where: str) -> None:
        if self.route and not _PLACES.search(self.route):
            raise ConfigError(
                f"{where}: route: {self.route!r} names neither {{route}} nor {{type}}",
                'give it as "shop.{route}"',
            )
        if self.messages and "{route}" not in (self.route or "{route}"):
            raise ConfigError(
                f"{where}: route: logical messages have a {{route}}, and no {{type}}", _REFERENCE
            )
        if self.transform_transaction:
            self._check_alone(where)
        if self.transaction_changes <= 0:
            raise ConfigError(f"{where}: transaction_changes: must be greater than 0")
        if self.tables == () and not self.messages:
            raise ConfigError(f"{where}: tables: none is named", "name some, or give null for all")

    def _check_alone(self, where: str) -> None:
        place = self.transform_transaction
        if not FUNCTION.fullmatch(place):
            raise ConfigError(
                f"{where}: transform_transaction: {place!r} is no place of a function",
                'give it as "package.module:function"',
            )
        given = [name for name in ("outbox", "transform", "messages", "schemas") if getattr(self, name)]
        if self.format != "json":
            given.append("format")
        if given:
            raise ConfigError(
                f"{where}: transform_transaction makes all events, and {', '.join(given)} would make others",
                "have the function do it, or give it another publisher",
            )

    def _check_streams(self, where: str) -> None:
        if not self.database:
            raise ConfigError(
                f"{where} has no database",
                "give the name by which consumers know the source; it is part of the streams' names",
            )
        for key in ("namespace", "database"):
            if not _STREAM_WORD.fullmatch(getattr(self, key)):
                raise ConfigError(
                    f"{where}: {key}: may hold only A-Z, a-z, 0-9, _ and -, at most 100 of them"
                )

    def _check_topic(self, where: str) -> None:
        rest = self.topic.replace("{schema}", "s").replace("{table}", "t")
        if not _TOPIC.fullmatch(rest):
            raise ConfigError(
                f"{where}: topic: {self.topic!r} may hold A-Z, a-z, 0-9, ., _, -, {{schema}} and {{table}}",
                'as "shop.{schema}.{table}"',
            )
        if self.tombstones and not ("{schema}" in self.topic and "{table}" in self.topic):
            raise ConfigError(
                f"{where}: tombstones: several tables would share a topic, and rows of one delete another's",
                "have topic hold {schema} and {table}",
            )

    def metrics_address(self) -> tuple[str, int]:
        """Host and port of the Prometheus endpoint. Raises ConfigError."""
        host, colon, port = self.metrics.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(
                f"publishers: {self.name}: metrics: {self.metrics!r} is no address", "as 127.0.0.1:9187"
            )
        return host, int(port)


def _check(where: str, value: object, hint: Any) -> None:
    if hint == _SOME_TEXTS:
        fits, described = value is None or is_of(value, tuple[str, ...]), "a list of strings, or null"
    else:
        fits, described = is_of(value, hint), describe(hint)
    if not fits:
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"{where}: {shown!r} must be {described}", _REFERENCE)
