"""The settings of a publisher in a pipeline file, and their validation."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args, get_type_hints

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.business_events import FUNCTION, Rule, parse_rules
from airflow_provider_pgrepl.replication.settings.fields import describe, is_of
from airflow_provider_pgrepl.replication.settings.publisher_columns import ColumnRules, RowFilter
from airflow_provider_pgrepl.replication.settings.targets import FORMATS, TARGETS, FormatName, TargetName

OnError = Literal["stop_table", "skip_and_record"]
Unrouted = Literal["error", "drop"]
NewColumns = Literal["publish", "stop"]
Unchanged = Literal["mark", "fill", "look_up", "require"]
"""Handling of an unchanged TOAST value, which the server did not send. `mark`: the event names it as missing.
`fill`: it is taken from the row's previous change. `look_up`: like `fill`, or else from the lake. `require`:
like `look_up`, and an event that still lacks a value is an error of its table (`on_error`)."""
SubjectNames = Literal["topic", "record", "topic_record"]
"""Confluent's naming strategies for subjects: by the topic, by the record's name, or by both."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_]{0,39}")
_SOME_TEXTS = tuple[str, ...] | None
_REFERENCE = errors.reference("publishers")
_PLACES = re.compile(r"\{route\}|\{type\}")


@dataclass(frozen=True, kw_only=True)
class PublisherSettings:
    """The settings of one publisher, as `parse_publisher` returns them.

    - `conn_id`: the Airflow connection of the target; default: `pgrepl_<target>`.
    - `tables`: `schema.name` or `schema.*`; None for all tables of the pipeline.
    - `exchange` (RabbitMQ): default: `pgrepl.<pipeline>`.
    - `stream` (NATS): default: the pipeline's name.
    - `namespace`, `database` (format `creek`): parts of the names of creek's streams. `wire`: the version of
      creek's wire format.
    - `topic` (Kafka): the template of each table's topic; default: `<pipeline>.{schema}.{table}`.
    - `tombstones` (Kafka): publish a tombstone after each delete.
    - `transactions` (Kafka): publish the changes of a source transaction in one Kafka transaction.
    - `begin`: the position at which the first run starts, `oldest` or `newest`.
    - `on_error`: handling of an event that cannot be created, or that the target rejects for its content.
    - `unchanged`: handling of unchanged TOAST values, which the server did not send.
    - `unrouted` (RabbitMQ): `error` treats an event that no queue receives as such an error, `drop` drops it.
    - `max_event_bytes`: the maximum size of an event that the target accepts.
    - `publish_keep_h`: hours for which unpublished changes are kept.
    - `metrics`: `host:port` of a Prometheus endpoint.
    - `exclude_columns`, `hash_columns`, `mask_columns`, `rename_columns`: see ColumnRules.
    - `new_columns`: publish a column that was added after the publisher started, and that none of these
      settings names, or stop its table.
    - `row_filter`: the rows to publish, see RowFilter.
    - `salt_conn_id`: the Airflow connection whose password is part of each hash.
    - `outbox`, `transform`: the tables whose changes become business events, see `settings.business_events`.
    - `transform_transaction`: a function that creates events from whole transactions of at most
      `transaction_changes` changes.
    - `messages`: the prefixes of logical messages that become events.
    - `route`: the template of topics or routing keys of business events, with `{route}` and `{type}`.
    - `format`: the format of the bodies of changes; default: `creek` for NATS, `json` for other targets.
    - `database`, `schemas` (format `debezium`): the source database; include the schema in each message.
    - `registry_conn_id` (format `avro`): the Airflow connection of the schema registry; default:
      `pgrepl_registry`. `subject_names`: the naming strategy of its subjects.
    - `cloudevents`: also set the headers of CloudEvents.
    - `source`: the name of the source in events; default: the pipeline's name.
    """

    name: str
    target: TargetName
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
    format: FormatName = "json"
    registry_conn_id: str = ""
    subject_names: SubjectNames = "topic"
    source: str = ""
    schemas: bool = False
    cloudevents: bool = False

    @property
    def whole(self) -> int | None:
        """The maximum number of changes of a transaction that must be read whole; None if none must be."""
        return self.transaction_changes if self.transform_transaction else None

    @property
    def place(self) -> str:
        """The destination of the events at the target. No two publishers may have the same one."""
        return (FORMATS[self.format].place_of or TARGETS[self.target].place_of)(self)

    @property
    def full_place(self) -> str:
        """The destination of the events, with the kind of the target."""
        return f"{self.target}: {self.place}"

    @cached_property
    def column_rules(self) -> ColumnRules:
        """The rules of the columns that are excluded, hashed, masked or renamed. Raises ConfigError."""
        return ColumnRules.parse(
            self.exclude_columns, self.hash_columns, self.mask_columns, self.rename_columns
        )

    @cached_property
    def rows(self) -> RowFilter:
        """The filter of the rows that are published. Raises ConfigError."""
        return RowFilter.parse(self.row_filter)

    @cached_property
    def rules(self) -> dict[TableName, Rule]:
        """The rule of each table whose changes become business events. Raises ConfigError."""
        return parse_rules(self.outbox, self.transform)

    def metrics_address(self) -> tuple[str, int]:
        """Return host and port of the Prometheus endpoint. Raises ConfigError."""
        host, colon, port = self.metrics.rpartition(":")
        if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(
                f"publishers: {self.name}: metrics: {self.metrics!r} is no address", "as 127.0.0.1:9187"
            )
        return host, int(port)


def parse_publisher(
    pipeline: str, name: str, given: object, *, has_lake_tables: bool = True
) -> PublisherSettings:
    """Parse the entry `name` of a pipeline file's `publishers`. Raises ConfigError."""
    where = f"publishers: {name}"
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"publishers: {name!r} may hold only a-z, 0-9 and _, at most 40 of them, and not begin with _"
        )
    if not isinstance(given, dict):
        raise ConfigError(f"{where} must be an object", _REFERENCE)
    types = get_type_hints(PublisherSettings)
    known = [field.name for field in dataclasses.fields(PublisherSettings) if field.name != "name"]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            f"{where} has unknown key {', '.join(map(repr, unknown))}", errors.known_keys(unknown, known)
        )
    if "target" not in given:
        raise ConfigError(f"{where} has no target", f"one of {', '.join(map(repr, get_args(TargetName)))}")
    values: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in given.items()
    }
    for key, value in values.items():
        _check(f"{where}: {key}", value, types[key])
    target = values["target"]
    formats = TARGETS[target].formats
    body = values.setdefault("format", formats[0])
    if body not in formats:
        raise ConfigError(
            f"{where}: format: {body!r} is not of target {target!r}",
            f"one of {', '.join(map(repr, formats))}",
        )
    _check_kinds(where, values)
    _settle_unchanged(where, values, has_lake_tables=has_lake_tables)
    defaults = {"conn_id": f"pgrepl_{target}", "source": pipeline, **TARGETS[target].defaults(pipeline)}
    for key in FORMATS[body].excludes:
        defaults.pop(key, None)
    named = {key: value for key, value in values.items() if value != "" or key not in defaults}
    fields: dict[str, Any] = {**defaults, **named, "name": name}
    found = PublisherSettings(**fields)
    _check_values(found, where)
    return found


def _check_kinds(where: str, values: dict[str, Any]) -> None:
    """Raise ConfigError for settings of another target, or of another format."""
    for target, kind in TARGETS.items():
        for key in kind.settings:
            if key in values and values["target"] != target:
                raise ConfigError(f"{where}: {key}: is of target {target!r} alone", _REFERENCE)
    own = FORMATS[values["format"]]
    for name, body in FORMATS.items():
        if own is not body and body.unsent and values.get("unchanged") == body.unsent:
            raise ConfigError(
                f"{where}: unchanged: {body.unsent!r} is of {name}'s format",
                "set it to look_up: other formats name the values that are missing",
            )
        for key in body.settings:
            if key in values and own is not body:
                raise ConfigError(f"{where}: {key}: is of {name}'s format", _REFERENCE)
    for key in own.excludes:
        if key in values:
            raise ConfigError(
                f"{where}: {key}: is not of {values['format']}'s format", "set format to json, or debezium"
            )


def _settle_unchanged(where: str, values: dict[str, Any], *, has_lake_tables: bool) -> None:
    """Check `unchanged` for a pipeline without lake tables, and set its default for creek's format.

    Without lake tables, a value that the server did not send can only be in the changelog. A missing value
    would look like NULL in creek's format, so an event with one is not sent. Other formats name missing
    values. Raises ConfigError.
    """
    if has_lake_tables:
        return
    unsent = FORMATS[values["format"]].unsent
    given = values.setdefault("unchanged", unsent) if unsent else values.get("unchanged", "fill")
    fits = given == unsent if unsent else given != "look_up"
    if not fits:
        raise ConfigError(
            f"{where}: unchanged: {given!r} does not go with lake_tables: none",
            "set it to require: an event that lacks a value stops its table, or is recorded and not sent"
            " (on_error); a NULL would be taken for the value"
            if unsent
            else "there is no lake to look into: set it to fill",
        )


def _check_values(settings: PublisherSettings, where: str) -> None:
    try:
        _ = settings.column_rules, settings.rules, settings.rows
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", error.hint) from None
    _check_numbers(settings, where)
    if settings.metrics:
        settings.metrics_address()
    FORMATS[settings.format].check(settings, where)
    TARGETS[settings.target].check(settings, where)
    _check_business(settings, where)


def _check_numbers(settings: PublisherSettings, where: str) -> None:
    if settings.max_event_bytes <= 0:
        raise ConfigError(f"{where}: max_event_bytes: must be greater than 0")
    if not 0 < settings.publish_keep_h <= 876_000:
        raise ConfigError(f"{where}: publish_keep_h: must be greater than 0, and not more than 876000")


def _check_business(settings: PublisherSettings, where: str) -> None:
    if settings.route and not _PLACES.search(settings.route):
        raise ConfigError(
            f"{where}: route: {settings.route!r} names neither {{route}} nor {{type}}",
            'give it as "shop.{route}"',
        )
    if settings.messages and "{route}" not in (settings.route or "{route}"):
        raise ConfigError(f"{where}: route: logical messages have a {{route}}, and no {{type}}", _REFERENCE)
    if settings.transform_transaction:
        _check_alone(settings, where)
    if settings.transaction_changes <= 0:
        raise ConfigError(f"{where}: transaction_changes: must be greater than 0")
    if settings.tables == () and not settings.messages:
        raise ConfigError(f"{where}: tables: none is named", "name some, or give null for all")


def _check_alone(settings: PublisherSettings, where: str) -> None:
    place = settings.transform_transaction
    if not FUNCTION.fullmatch(place):
        raise ConfigError(
            f"{where}: transform_transaction: {place!r} is no place of a function",
            'give it as "package.module:function"',
        )
    given = [name for name in ("outbox", "transform", "messages", "schemas") if getattr(settings, name)]
    if not FORMATS[settings.format].takes_transactions:
        given.append("format")
    if given:
        raise ConfigError(
            f"{where}: transform_transaction makes all events, and {', '.join(given)} would make others",
            "have the function do it, or give it another publisher",
        )


def _check(where: str, value: object, hint: Any) -> None:
    if hint == _SOME_TEXTS:
        fits, described = value is None or is_of(value, tuple[str, ...]), "a list of strings, or null"
    else:
        fits, described = is_of(value, hint), describe(hint)
    if not fits:
        shown = list(value) if isinstance(value, tuple) else value
        raise ConfigError(f"{where}: {shown!r} must be {described}", _REFERENCE)
