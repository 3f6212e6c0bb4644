"""The settings of a publisher in a pipeline file, by subject: its columns and rows, its business events, and
what it sends where. The text below a field describes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Annotated, Any, Literal

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName

from .mistakes import (
    COLUMN_HINT,
    TABLE,
    ColumnText,
    Fields,
    Hours,
    Rule,
    TablePattern,
    TableText,
    between,
    distinct,
    filled,
    frozen,
    matching,
)
from .targets import FormatName, TargetName

_MOST_BYTES = 255
"""The maximum size of a new column name. PostgreSQL's own names have at most 63 bytes."""
Values = frozenset[str | None]
"""Text values as PostgreSQL writes them; None is NULL."""
_ROWS_HINT = 'give the values of its columns, as {"status": ["paid", "shipped"]}'
_VALUE_HINT = Rule(hint="give another value as a string, as PostgreSQL writes it: '12.50'")
_Value = str | int | bool | None
OfRows = Annotated[
    dict[
        str,
        Annotated[
            _Value
            | Annotated[tuple[_Value, ...], filled(_ROWS_HINT, "no value is given: no row would be sent")],
            _VALUE_HINT,
        ],
    ],
    filled(_ROWS_HINT, "names no column"),
]
"""A setting's type: the allowed values of a table's columns."""
OPERATIONS = ("insert", "update", "delete", "truncate")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The location of a function, `module:function`."""
_REFERENCE = errors.reference("business-events")
_OWN_HEADERS = ("id", "generation", "type", "content-type", "op", "event_id")
_OWN_PREFIXES = ("ce_", "ce-", "pgrepl-", "nats-")
_ROUTING_HEADERS = ("CC", "BCC")
"""RabbitMQ sends copies to the routing keys in these headers ("Sender-selected Distribution")."""
_Column = Annotated[str, filled(_REFERENCE, "must be a column's name")]
FUNCTION_FORM = "package.module:function"
FUNCTION_PROBLEM = ("is not the location of a function", f"write it as {FUNCTION_FORM}")
OnError = Literal["stop_table", "skip_and_record"]
Unrouted = Literal["error", "drop"]
NewColumns = Literal["publish", "stop"]
Unchanged = Literal["mark", "fill", "look_up", "require"]
SubjectNames = Literal["topic", "record", "topic_record"]
_PLACES = re.compile(r"\{route\}|\{type\}")
RowsByTable = Annotated[dict[TableText, OfRows], distinct(TableName.parse)]
FUNCTION_OR_NONE = matching(f"({FUNCTION.pattern})?", *FUNCTION_PROBLEM)


def _check_name(name: str) -> None:
    if not name or "\0" in name or len(name.encode(errors="surrogatepass")) > _MOST_BYTES:
        raise ValueError(f"{name!r} is no name of a column")


NewName = Annotated[str, Rule(_check_name, f"give a string of at most {_MOST_BYTES} bytes")]
"""A setting's type: the new name of a column."""


@dataclass(frozen=True)
class ColumnRules:
    """The rules of a publisher for columns.

    `excluded`: not published. `hashed`: published as a hash. `masked`: published as a constant. `renamed`:
    the new names. Raises ConfigError for a column in two of the first three, for an excluded column that is
    renamed, and if two columns of a table get the same new name.
    """

    excluded: frozenset[ColumnName] = frozenset()
    hashed: frozenset[ColumnName] = frozenset()
    masked: frozenset[ColumnName] = frozenset()
    renamed: Mapping[ColumnName, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for (one, columns), (other, more) in combinations(self._by_field.items(), 2):
            # A hashed or masked column may also be renamed.
            is_both = other == "rename_columns" and one != "exclude_columns"
            if not is_both and (twice := sorted(columns & more)):
                raise ConfigError(f"{twice[0]} is named by {one} and by {other}", "choose one of them")
        given = [(column.table, name) for column, name in self.renamed.items()]
        if alike := sorted({pair for pair in given if given.count(pair) > 1}):
            table, name = alike[0]
            raise ConfigError(f"rename_columns: two columns of {table} are to be called {name!r}")

    @classmethod
    def parse(
        cls,
        exclude_columns: Iterable[str],
        hash_columns: Iterable[str],
        mask_columns: Iterable[str],
        rename_columns: Mapping[str, str],
    ) -> ColumnRules:
        """Create the rules from a publisher's settings. Raises ConfigError, naming the setting."""
        renamed = {_column("rename_columns", given): name for given, name in rename_columns.items()}
        return cls(
            _parse("exclude_columns", exclude_columns),
            _parse("hash_columns", hash_columns),
            _parse("mask_columns", mask_columns),
            renamed,
        )

    @cached_property
    def all(self) -> frozenset[ColumnName]:
        """Every column that has a rule."""
        return frozenset().union(*self._by_field.values())

    def tables(self) -> frozenset[TableName]:
        """Return the tables that have a column with a rule."""
        return frozenset(column.table for column in self.all)

    @property
    def _by_field(self) -> dict[str, frozenset[ColumnName]]:
        return {
            "exclude_columns": self.excluded,
            "hash_columns": self.hashed,
            "mask_columns": self.masked,
            "rename_columns": frozenset(self.renamed),
        }


def _parse(name: str, given: Iterable[str]) -> frozenset[ColumnName]:
    return frozenset(_column(name, column) for column in given)


def _column(name: str, given: str) -> ColumnName:
    try:
        return ColumnName.parse(given)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}", COLUMN_HINT) from None


@dataclass(frozen=True)
class RowFilter:
    """A filter of rows: the allowed values, by table and column.

    A row is published if each of these columns has an allowed value.
    """

    tables: Mapping[TableName, Mapping[str, Values]] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, Mapping[str, object]]) -> RowFilter:
        """Create the filter from a publisher's settings. Raises ValueError for a name that is not valid."""
        return cls(
            {
                TableName.parse(name): {column: _values(one) for column, one in columns.items()}
                for name, columns in given.items()
            }
        )


def _values(given: object) -> Values:
    return frozenset(map(_text, given if isinstance(given, list | tuple) else [given]))


def _text(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return ("f", "t")[value] if isinstance(value, bool) else str(value)


def is_own_header(name: str) -> bool:
    """Return True if the publisher, or the broker, uses a header of this name itself."""
    return name in (*_OWN_HEADERS, *_ROUTING_HEADERS) or name.lower().startswith(_OWN_PREFIXES)


def _check_headers(headers: Mapping[str, str]) -> None:
    if own := sorted(filter(is_own_header, headers)):
        raise ValueError(f"{own[0]!r} is a header that the publisher or the broker uses")


@dataclass(frozen=True)
class Outbox:
    """An insert-only table whose rows are events. `headers` maps names of headers to columns.

    Each other field except `table` names a column, or is None; `payload` must name one. The defaults are the
    column names that Debezium's outbox event router expects.
    """

    table: Annotated[TableName, TABLE]
    """The table itself, as `schema.table`."""
    event_id: _Column | None = "id"
    """The column of the application's own ID of the event: header `event_id`."""
    route: _Column | None = "aggregatetype"
    """The column of the event's route, which the publisher's setting `route` uses."""
    key: _Column | None = "aggregateid"
    """The column of the message's key: events with the same key keep their order."""
    type: _Column | None = "type"
    """The column of the event's type."""
    payload: _Column = "payload"
    """The column of the message's body: text is sent unchanged, JSON on one line, `bytea` as bytes."""
    headers: Annotated[dict[str, str], Rule(_check_headers, "choose another name")] = field(
        default_factory=dict
    )
    """By header, a column whose value as text is sent; NULL sends no header."""


@dataclass(frozen=True)
class FieldMapping:
    """A transform that creates an event from each change of a table whose operation is one of `ops`.

    The event is an object whose `fields` are columns of the row after the change; of a delete, of the row
    before it. `key`: a column; default: the row's key.
    """

    fields: Annotated[dict[str, str], filled(_REFERENCE)]
    """The body, a JSON object: by name, a column of the row after the change; for a delete, before it."""
    ops: Annotated[tuple[Literal["insert", "update", "delete"], ...], filled(_REFERENCE)] = (
        "insert",
        "update",
        "delete",
    )
    """The operations that produce an event."""
    type: str = ""
    """The event's type; empty: the operation."""
    route: str = ""
    """The event's route; empty: the table."""
    key: str | None = None
    """A column; null: the row's key."""


EventRule = Outbox | FieldMapping | str
"""A string is the location of a function, `module:function`."""


OutboxObject = Annotated[dict[str, Any], Fields(Outbox, "business-events", may_be_empty=True)]
TransformValue = (
    Annotated[str, matching(FUNCTION.pattern, *FUNCTION_PROBLEM)]
    | Annotated[dict[str, Any], Fields(FieldMapping, "business-events")]
)
"""The settings' types of `outbox`, and of a table in `transform`."""


def parse_rules(outbox: Mapping[str, Any], transform: Mapping[str, Any]) -> dict[TableName, EventRule]:
    """Return the rule of each table in `outbox` and `transform`. Raises ConfigError for a table in both."""
    found: dict[TableName, EventRule] = {}
    if outbox:
        table = TableName.parse(outbox["table"])
        found[table] = Outbox(**{**outbox, "table": table})
    for name, given in transform.items():
        table = TableName.parse(name)
        if table in found:
            raise ConfigError(f"{table} is named by outbox and by transform")
        found[table] = given if isinstance(given, str) else FieldMapping(**frozen(given))
    return found


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
