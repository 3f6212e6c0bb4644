"""The settings of a publisher's business events: outbox tables, and transforms of tables' changes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.mistakes import Fields, Rule, frozen
from airflow_provider_pgrepl.replication.settings.rules import TABLE, filled, matching

OPERATIONS = ("insert", "update", "delete", "truncate")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The location of a function, `module:function`."""
_REFERENCE = errors.reference("business-events")
_OWN_HEADERS = ("id", "generation", "type", "content-type", "op", "event_id")
_OWN_PREFIXES = ("ce_", "ce-", "pgrepl-", "nats-")
_ROUTING_HEADERS = ("CC", "BCC")
"""RabbitMQ sends copies to the routing keys in these headers ("Sender-selected Distribution")."""


def is_own_header(name: str) -> bool:
    """Return True if the publisher, or the broker, uses a header of this name itself."""
    return name in (*_OWN_HEADERS, *_ROUTING_HEADERS) or name.lower().startswith(_OWN_PREFIXES)


def _check_headers(headers: Mapping[str, str]) -> None:
    if own := sorted(filter(is_own_header, headers)):
        raise ValueError(f"{own[0]!r} is a header that the publisher or the broker uses")


_Column = Annotated[str, filled(_REFERENCE, "must be a column's name")]


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


FUNCTION_FORM = "package.module:function"
FUNCTION_PROBLEM = ("is not the location of a function", f"write it as {FUNCTION_FORM}")
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
