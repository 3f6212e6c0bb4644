"""Conversion of changelog rows to business events, for the tables whose changes a publisher transforms."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import ConfigError, TransformError, one_line
from airflow_provider_pgrepl.replication.changelog.gaps import NO_RELATION
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents, JsonShape
from airflow_provider_pgrepl.replication.events.formats.json_text import embedded, json_value, on_one_line
from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.publisher_sections import (
    FUNCTION_FORM,
    EventRule,
    FieldMapping,
    Outbox,
    is_own_header,
)
from airflow_provider_pgrepl.replication.values.scalars import Binary
from airflow_provider_pgrepl.trace import trace_of, traced

from .changes import Change, ChangeConverter, ChangeMaker, OptionsOf, TypedChanges
from .columns import PublishedColumns, kin_error
from .event import BusinessRoute, Event
from .position import EventPosition
from .reader import MESSAGES
from .relations import KnownRelations, TableSelection

_UNSENT_HINT = "have the server send it: ALTER TABLE … REPLICA IDENTITY FULL, or STORAGE PLAIN of the column"
log = logging.getLogger(__name__)
_JSON = "application/json"
_CONTENT = Binary()
Given = TypeVar("Given")
TRANSACTIONS = "transactions"
"""The table name in events that a transaction function makes. Also their route, unless the function sets one.
"""


@dataclass(frozen=True)
class BusinessEvent:
    """An event that a transform returns.

    A publisher adds the change's ID to each event. Consumers that ignore repeated events compare that ID, not
    `event_id`.

    :param payload: the body of the message. Bytes and strings are sent unchanged; any other value is sent as
        JSON, encoded like the values of a Change
    :param key: the message's key, encoded like `payload`. Kafka keeps the order of events with the same key.
        Default: the row's key
    :param route: replaces `{route}` in the publisher's setting `route`, which makes the topic, routing key or
        subject. Default: the table's name
    :param type: replaces `{type}` there, and is sent as a header or property. Default: the change's operation
    :param event_id: the application's own ID of the event, sent as header `event_id`
    :param headers: more headers, by name
    :param content_type: the media type of `payload`. Default: `application/json`, for strings `text/plain`,
        for bytes `application/octet-stream`
    """

    payload: Any
    key: Any = None
    route: str = ""
    type: str = ""
    event_id: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    content_type: str = ""


Transform = Callable[[Change], Iterable[BusinessEvent] | None]
"""Returns the events to send instead of a change. It must be pure: a change may be passed to it more than
once."""


TransactionFunction = Callable[[Sequence[Change]], Iterable[BusinessEvent] | None]
"""Returns the events to send instead of the changes of a transaction.

It gets the changes of the publisher's tables, at least one, in order. It must be pure: the same transaction
may be passed to it more than once.
"""


def transform_of(rule: EventRule) -> Transform:
    """Return the transform of a rule. Raises ConfigError for a function that cannot be imported."""
    if isinstance(rule, Outbox):
        return lambda change: _of_outbox(rule, change)
    if isinstance(rule, FieldMapping):
        return lambda change: _of_fields(rule, change)
    function: Transform = imported(rule)
    return function


def _of_outbox(outbox: Outbox, change: Change) -> Iterator[BusinessEvent]:
    """Yield the event of an inserted outbox row.

    Deletes and truncates yield none, because applications delete sent rows. Raises TransformError for an
    update.
    """
    if change.op in ("delete", "truncate"):
        return
    if change.op == "update":
        raise TransformError(
            f"a row of the outbox {change.table} was updated, and its event was sent before",
            "insert another row instead. With on_error set to skip_and_record, such updates are"
            " skipped and recorded",
        )
    row = change.data or {}
    payload = _value(change, row, outbox.payload)
    yield BusinessEvent(
        b"" if payload is None else payload,
        _value(change, row, outbox.key),
        _text(change, row, outbox.route),
        _text(change, row, outbox.type),
        _text(change, row, outbox.event_id),
        {
            name: _text(change, row, column)
            for name, column in outbox.headers.items()
            if _value(change, row, column) is not None
        },
        _content_type(change, outbox.payload, payload),
    )


def _of_fields(mapping: FieldMapping, change: Change) -> Iterator[BusinessEvent]:
    row = change.data if change.data is not None else change.old
    if change.op in mapping.ops and row is not None:
        payload = {name: _value(change, row, column) for name, column in mapping.fields.items()}
        key = None if mapping.key is None else _value(change, row, mapping.key)
        yield BusinessEvent(payload, key, mapping.route, mapping.type)


def _value(change: Change, row: Mapping[str, Any], column: str | None) -> Any:
    """Return the value of a column from the row, or, if the update did not send it, from the old row.

    Raises TransformError if the table lacks the column or the server did not send its value: without REPLICA
    IDENTITY FULL a delete has the columns of the key only.
    """
    if column is None:
        return None
    if column in row:
        value = row[column]
        return Json(value) if column in change.json_columns and value is not None else value
    if change.old is not None and column in change.old and column in change.unchanged:
        return change.old[column]
    if column in change.unchanged or change.op == "delete":
        raise TransformError(
            f'column "{one_line(column)}" of {change.table} was not sent with {_article(change.op)}',
            _UNSENT_HINT,
        )
    raise TransformError(
        f'{change.table} has no column "{one_line(column)}", which the publisher\'s settings name',
        "fix the column's name in outbox or transform of the publisher",
    )


def _article(op: str) -> str:
    return f"an {op}" if op[0] in "aeiou" else f"a {op}"


class Json(str):
    """A string that is already JSON."""

    __slots__ = ()


def _text(change: Change, row: Mapping[str, Any], column: str | None) -> str:
    value = _value(change, row, column)
    if value is None or isinstance(value, str):
        return value or ""
    made = json_value(value)
    return str(json.loads(made)) if made.startswith('"') else made


def _content_type(change: Change, column: str, payload: Any) -> str:
    if column in change.json_columns:
        return "application/json"
    return "application/octet-stream" if isinstance(payload, bytes) else "text/plain"


def imported(location: str) -> Any:
    """Import a function named as `module:function`. Raises ConfigError."""
    module, _, name = location.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        failed = ConfigError(
            f"transform: {location} cannot be imported: {type(error).__name__}: {one_line(str(error))}",
            "the module must be importable where the publisher runs: install it, or put it on PYTHONPATH",
        )
        raise traced(failed, error) from None
    if not callable(found):
        raise ConfigError(f"transform: {location} is not a function", f"name a function as {FUNCTION_FORM}")
    return found


class BusinessEvents(ChangeConverter[Event]):
    """Makes the events of a publisher that transforms the changes of some tables.

    `transforms`: the transforms by table, which get the changes of `typed`. `plain` makes the events of all
    other tables. Logical messages that the publisher selects also become events.
    """

    def __init__(
        self, plain: ChangeConverter[Event], typed: JsonEvents, transforms: Mapping[TableName, Transform]
    ) -> None:
        super().__init__(plain.relations, plain.options_of, plain.wanted, plain.published)
        self._plain, self._typed, self._transforms = plain, typed, transforms

    def of(self, rows: pa.Table) -> list[Event]:
        made: list[Any] = super().of(rows)
        events = [event for one in made for event in (one if isinstance(one, list) else (one,))]
        messages = list(self._messages(rows)) if self.wanted.has_messages else []
        if not messages:
            return events
        return sorted([*events, *messages], key=lambda event: event.position)

    def shape_of(self, record: RelationRecord) -> ChangeMaker[Any]:
        # A renamed table keeps its transform: its rows must never be sent instead.
        names = record.names | self.relations.names(record.message.oid)
        for name in sorted(names & self._transforms.keys()):
            return _Transformed(self._typed.shape_of(record), self._transforms[name])
        if kin := sorted(self._transforms.keys() & self.relations.kin(record.message.oid)):
            raise kin_error(record.name, kin[0])
        return self._plain.shape_of(record)

    def _messages(self, rows: pa.Table) -> Iterator[Event]:
        wanted = rows.filter(pc.equal(rows["op"], "M"))
        for row in wanted.to_pylist():
            prefix, content, *_ = row["new"]
            if prefix == DDL_PREFIX or not self.wanted.has_prefix(prefix):
                continue
            position = EventPosition(Epoch(row["epoch"]), LSN(row["commit_lsn"]), row["ordinal"])
            if content is None:
                raise TransformError(
                    f"the logical message at {position} with prefix {one_line(prefix)!r} was larger than"
                    " message_bytes: its content was not kept",
                    "the content is lost. To continue without this message, set on_error of the publisher to"
                    " skip_and_record until it is passed. For later messages, raise message_bytes of the"
                    " pipeline and restart the replication app",
                )
            (body,) = _CONTENT.parse(pa.array([content])).to_pylist()
            event = Event(position, str(position), NO_RELATION, MESSAGES, "insert", row["commit_ts"], body)
            event.key = f'{{"prefix":{json_value(prefix)}}}'.encode()
            event.business = BusinessRoute(prefix, "", "application/octet-stream")
            yield event


@dataclass(frozen=True)
class _Transformed:
    """A relation whose changes are transformed. `typed`: makes the changes and their keys."""

    typed: JsonShape
    transform: Transform

    def make(self, rows: pa.Table) -> Iterator[list[Event]]:
        """Yield the events of each change."""
        return (self._events(change) for change in self.typed.changes.make(rows))

    def _events(self, change: Change) -> list[Event]:
        table = str(self.typed.changes.table)
        make = partial(_event, self.typed, change)
        return transformed(self.transform, change, table, change.commit_lsn, make)


def transformed(
    function: Callable[[Given], Iterable[BusinessEvent] | None],
    given: Given,
    what: str,
    at: LSN,
    make: Callable[[int, BusinessEvent], Event],
) -> list[Event]:
    """Return the events that `function` makes of a change, or of a transaction's changes.

    `make`: makes an Event of a BusinessEvent and its number. `what`: names the table, or the transactions, in
    errors. `at`: the commit LSN. Raises TransformError, without any text that may hold values of rows.
    """
    failed, trace = "", ""
    try:
        found = list(function(given) or ())
        failed = next(filter(None, map(_fault, found)), "")
        if not failed:
            return [make(number, one) for number, one in enumerate(found)]
    except TransformError:
        raise
    except (Exception, SystemExit) as caught:  # noqa: BLE001 - a user's function; its text may hold values
        failed, trace = type(caught).__name__, trace_of(caught)
        log.error("the transform of %s failed: %s", what, trace)
    error = TransformError(
        f"the transform of {what} failed: {failed}",
        f"`pgrepl events try FILE.json --publisher NAME --lsn {at}` shows where",
    )
    error.trace = trace
    raise error


def _fault(made: object) -> str:
    """Return the reason why a transform's result is not a valid event; an empty string if it is valid."""
    if not isinstance(made, BusinessEvent):
        return "it returned an object that is not a BusinessEvent"
    texts = (made.route, made.type, made.event_id, made.content_type, *made.headers, *made.headers.values())
    if not all(isinstance(one, str) for one in texts):
        return "route, type, event_id, content_type and headers must be strings"
    if any(map(is_own_header, made.headers)):
        return "a header has a name that the publisher or the broker uses"
    if not all(map(_is_sendable, texts)):
        return "route, type, event_id, content_type or a header contains NUL or a lone surrogate"
    return ""


def _is_sendable(text: str) -> bool:
    """Return False for text with a NUL or a surrogate, which broker clients truncate or fail on."""
    return not any(char == "\0" or "\ud800" <= char <= "\udfff" for char in text)


def _event(typed: JsonShape, change: Change, number: int, made: BusinessEvent) -> Event:
    """Return the event of a transformed change.

    The first has the change's id; later ones append their number.
    """
    name = change.id if number == 0 else f"{change.id}.{number}"
    headers = {**made.headers, **({"event_id": made.event_id} if made.event_id else {})}
    position, at, body = change.position, change.commit_ts, as_bytes(made.payload)
    event = Event(position, name, change.relation_id, change.table, change.op, at, body)
    event.key = typed.key_of(change) if made.key is None else as_bytes(made.key)
    event.business = BusinessRoute(
        made.route or change.table, made.type or change.op, content_type_of(made), headers
    )
    return event


def content_type_of(made: BusinessEvent) -> str:
    """Return the content type of an event."""
    if made.content_type:
        return made.content_type
    if isinstance(made.payload, bytes | bytearray | memoryview):
        return "application/octet-stream"
    return "text/plain" if isinstance(made.payload, str) and not isinstance(made.payload, Json) else _JSON


def as_bytes(value: Any) -> bytes:
    """Return a body or key as it is sent."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Json):
        return on_one_line(embedded(value)).encode()
    return (value if isinstance(value, str) else on_one_line(_json(value))).encode()


def _json(value: Any) -> str:
    """Return a value as JSON like `json_value`, with embedded Json strings unchanged."""
    if isinstance(value, Json):
        return embedded(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json_value(str(name))}:{_json(one)}" for name, one in value.items()) + "}"
    return json_value(value)


class TransactionEvents(ChangeConverter[Event]):
    """Makes events with a function that gets whole transactions. `of` must be passed whole transactions."""

    def __init__(
        self,
        function: TransactionFunction,
        relations: KnownRelations,
        options_of: OptionsOf,
        wanted: TableSelection,
        published: PublishedColumns,
    ) -> None:
        super().__init__(relations, options_of, wanted, published)
        self._function = function
        self._typed = TypedChanges(relations, options_of, wanted, published)

    def of(self, rows: pa.Table) -> list[Event]:
        """Return the events of whole transactions. Raises TransformError, and the errors of TypedChanges."""
        by_transaction = groupby(self._typed.of(rows), lambda change: change.commit_lsn)
        return [event for _, changes in by_transaction for event in self._events(list(changes))]

    def _events(self, changes: list[Change]) -> list[Event]:
        last = changes[-1]
        make = partial(_event_of_transaction, last)
        return transformed(self._function, changes, TRANSACTIONS, last.commit_lsn, make)


def _event_of_transaction(last: Change, number: int, made: BusinessEvent) -> Event:
    """Return an event of a transaction.

    The first has the id of its last change; later ones append their number.
    """
    name = last.id if number == 0 else f"{last.id}.{number}"
    headers = {**made.headers, **({"event_id": made.event_id} if made.event_id else {})}
    event = Event(
        last.position, name, NO_RELATION, TRANSACTIONS, last.op, last.commit_ts, as_bytes(made.payload)
    )
    event.key = None if made.key is None else as_bytes(made.key)
    event.business = BusinessRoute(
        made.route or TRANSACTIONS, made.type or "transaction", content_type_of(made), headers
    )
    return event
