"""Rows of the changelog → business events, where a publisher's settings make them of a table's changes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from airflow_provider_pgrepl.errors import TransformError, one_line
from airflow_provider_pgrepl.replication.changelog.gaps import NO_RELATION
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.business_event import BusinessEvent, Transform
from airflow_provider_pgrepl.replication.events.by_relation import ByRelation, Shape
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.columns import kin_error
from airflow_provider_pgrepl.replication.events.event import Business, Event
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents, JsonShape
from airflow_provider_pgrepl.replication.events.formats.json_format import embedded, json_value, on_one_line
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.reader import MESSAGES
from airflow_provider_pgrepl.replication.events.transforms import Json
from airflow_provider_pgrepl.replication.pgoutput.messages import DDL_PREFIX
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.business_events import is_own_header
from airflow_provider_pgrepl.replication.values.binary import Binary
from airflow_provider_pgrepl.trace import trace_of

log = logging.getLogger(__name__)

_JSON = "application/json"
_CONTENT = Binary()


class BusinessEvents(ByRelation[Event]):
    """Events of a publisher some of whose tables' changes are transformed: by `transforms`, given what
    `typed` has of them. Others' are those of `plain`. Logical messages that are wanted are events, too."""

    def __init__(
        self, plain: ByRelation[Event], typed: JsonEvents, transforms: Mapping[TableName, Transform]
    ) -> None:
        super().__init__(plain.relations, plain.choices_of, plain.wanted, plain.published)
        self._plain, self._typed, self._transforms = plain, typed, transforms

    def of(self, rows: pa.Table) -> list[Event]:
        made: list[Any] = super().of(rows)
        events = [event for one in made for event in (one if isinstance(one, list) else (one,))]
        messages = list(self._messages(rows)) if self.wanted.has_messages else []
        if not messages:
            return events
        return sorted([*events, *messages], key=lambda event: event.position)

    def shape_of(self, record: RelationRecord) -> Shape[Any]:
        # A table keeps its transform when it is renamed: rows of it are not sent instead.
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
                    f"a logical message with prefix {one_line(prefix)!r} was larger than message_bytes: its"
                    " content was not kept",
                    "raise message_bytes of the pipeline for those that come",
                )
            (body,) = _CONTENT.parse(pa.array([content])).to_pylist()
            at, said = row["commit_ts"], Business(prefix, "", "application/octet-stream")
            event = Event(position, str(position), NO_RELATION, MESSAGES, "insert", at, body)
            event.key, event.business = f'{{"prefix":{json_value(prefix)}}}'.encode(), said
            yield event


@dataclass(frozen=True)
class _Transformed:
    """A relation whose changes are transformed. `typed`: those, and their keys."""

    typed: JsonShape
    transform: Transform

    def make(self, rows: pa.Table) -> Iterator[list[Event]]:
        """Of each change its events."""
        return (self._events(change) for change in self.typed.changes.make(rows))

    def _events(self, change: Change) -> list[Event]:
        table = str(self.typed.changes.table)
        make = partial(_event, self.typed, change)
        return transformed(self.transform, change, table, change.commit_lsn, make)


Given = TypeVar("Given")


def transformed(
    function: Callable[[Given], Iterable[BusinessEvent] | None],
    given: Given,
    what: str,
    at: LSN,
    make: Callable[[int, BusinessEvent], Event],
) -> list[Event]:
    """What is made, by their numbers, of all that a function makes of a change, or of a transaction, that
    committed there; `what`: of whose changes it is. Raises TransformError, without what may hold values."""
    failed, trace = "", ""
    try:
        found = list(function(given) or ())
        failed = next(filter(None, map(_fault, found)), "")
        if not failed:
            return [make(number, one) for number, one in enumerate(found)]
    except TransformError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function; its text may hold values
        failed, trace = type(error).__name__, trace_of(error)
        log.error("the transform of %s failed: %s", what, trace)
    refused = TransformError(
        f"the transform of {what} failed: {failed}",
        f"`pgrepl events try FILE.json --publisher NAME --lsn {at}` shows where",
    )
    refused.trace = trace
    raise refused


def _fault(made: object) -> str:
    """What is wrong with something that a transform returned; empty for nothing."""
    if not isinstance(made, BusinessEvent):
        return "what it returns are not BusinessEvents"
    texts = (made.route, made.type, made.id, made.content_type, *made.headers, *made.headers.values())
    if not all(isinstance(one, str) for one in texts):
        return "routes, types, ids and headers are texts"
    if any(map(is_own_header, made.headers)):
        return "a header has a name of the publisher's own"
    return "" if all(map(_is_sendable, texts)) else "a route, type, id or header has a sign that is none"


def _is_sendable(text: str) -> bool:
    """Brokers' clients cut a text at a NUL, and end at half of a surrogate pair."""
    return not any(sign == "\0" or "\ud800" <= sign <= "\udfff" for sign in text)


def _event(typed: JsonShape, change: Change, number: int, made: BusinessEvent) -> Event:
    """The first has the change's own id; those after it a number more."""
    name = change.id if number == 0 else f"{change.id}.{number}"
    headers = {**made.headers, **({"event_id": made.id} if made.id else {})}
    said = Business(made.route or change.table, made.type or change.op, kind_of(made), headers)
    place, at, body = change.position, change.commit_ts, as_bytes(made.body)
    event = Event(place, name, change.relation_id, change.table, change.op, at, body)
    event.key = typed.key_of(change) if made.key is None else as_bytes(made.key)
    event.business = said
    return event


def kind_of(made: BusinessEvent) -> str:
    """Its content type."""
    if made.content_type:
        return made.content_type
    if isinstance(made.body, bytes | bytearray | memoryview):
        return "application/octet-stream"
    return "text/plain" if isinstance(made.body, str) and not isinstance(made.body, Json) else _JSON


def as_bytes(value: Any) -> bytes:
    """A body or key, as it is sent."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, Json):
        return on_one_line(embedded(value)).encode()
    return (value if isinstance(value, str) else on_one_line(_json(value))).encode()


def _json(value: Any) -> str:
    """As `json_value`, with the texts in it that are JSON already."""
    if isinstance(value, Json):
        return embedded(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{json_value(str(name))}:{_json(one)}" for name, one in value.items()) + "}"
    return json_value(value)
