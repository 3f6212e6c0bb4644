"""The settings of a publisher's business events: outbox tables, and transforms of tables' changes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.postgres.names import TableName

OPERATIONS = ("insert", "update", "delete", "truncate")
FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""The location of a function, `module:function`."""
_REFERENCE = errors.reference("business-events")
_OWN_HEADERS = ("id", "generation", "type", "content-type", "op", "event_id")
_OWN_PREFIXES = ("ce_", "ce-", "pgrepl-", "nats-")
_ROUTING_HEADERS = ("CC", "BCC")
"""RabbitMQ sends copies to the routing keys in these headers ("Sender-selected Distribution")."""


@dataclass(frozen=True)
class Outbox:
    """An insert-only table whose rows are events. `headers` maps names of headers to columns.

    Each other field except `table` names a column, or is None; `payload` must name one. The defaults are the
    column names that Debezium's outbox event router expects.
    """

    table: TableName
    id: str | None = "id"
    route: str | None = "aggregatetype"
    key: str | None = "aggregateid"
    type: str | None = "type"
    payload: str = "payload"
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class FieldMapping:
    """A transform that creates an event from each change of a table whose operation is one of `ops`.

    The event is an object whose `fields` are columns of the row after the change; of a delete, of the row
    before it. `key`: a column; default: the row's key.
    """

    fields: Mapping[str, str]
    ops: tuple[str, ...] = OPERATIONS[:3]
    type: str = ""
    route: str = ""
    key: str | None = None


Rule = Outbox | FieldMapping | str
"""A string is the location of a function, `module:function`."""


def is_own_header(name: str) -> bool:
    """Return True if the publisher, or the broker, uses a header of this name itself."""
    return name in (*_OWN_HEADERS, *_ROUTING_HEADERS) or name.lower().startswith(_OWN_PREFIXES)


def parse_rules(outbox: Mapping[str, Any], transform: Mapping[str, Any]) -> dict[TableName, Rule]:
    """Return the rule of each table in `outbox` and `transform`. Raises ConfigError, naming the setting."""
    found: dict[TableName, Rule] = {}
    if outbox:
        made = _parse_outbox(outbox)
        found[made.table] = made
    for name, given in transform.items():
        table = _table("transform", name)
        if table in found:
            raise ConfigError(f"transform: {table} is named by outbox, or twice")
        found[table] = _parse_transform(f"transform: {name}", given)
    return found


def _parse_outbox(given: Mapping[str, Any]) -> Outbox:
    values = _known("outbox", given, Outbox)
    headers = values.get("headers", {})
    if "table" not in values:
        raise ConfigError("outbox has no table", _REFERENCE)
    _check_texts("outbox: headers", headers)
    if own := sorted(filter(is_own_header, headers)):
        raise ConfigError(
            f"outbox: headers: {own[0]!r} is a header of the publisher's own", "call it otherwise"
        )
    for name in ("id", "route", "key", "type", "payload"):
        may_be_none = name != "payload"
        is_name = isinstance(values.get(name, name), str) and values.get(name, name)
        if not is_name and not (may_be_none and values[name] is None):
            raise ConfigError(f"outbox: {name}: {values[name]!r} must be a column's name", _REFERENCE)
    return Outbox(**{**values, "table": _table("outbox: table", values["table"])})


def _parse_transform(where: str, given: object) -> Rule:
    if isinstance(given, str):
        if not FUNCTION.fullmatch(given):
            raise ConfigError(
                f"{where}: {given!r} is no place of a function", 'give it as "package.module:function"'
            )
        return given
    values = _known(where, given, FieldMapping)
    if not values.get("fields"):
        raise ConfigError(f"{where} has no fields", _REFERENCE)
    _check_texts(f"{where}: fields", values["fields"])
    ops = values.get("ops", list(OPERATIONS[:3]))
    if not isinstance(ops, list) or not ops or not all(one in OPERATIONS[:3] for one in ops):
        raise ConfigError(f"{where}: ops: {ops!r} must be a list of insert, update and delete")
    for name in ("type", "route", "key"):
        if name in values and not isinstance(values[name], str):
            raise ConfigError(f"{where}: {name}: {values[name]!r} must be a string")
    return FieldMapping(**{**values, "ops": tuple(ops)})


def _known(where: str, given: object, kind: type) -> dict[str, Any]:
    if not isinstance(given, dict):
        functions = "" if kind is Outbox else ', or a function as "package.module:function"'
        raise ConfigError(f"{where} must be an object{functions}", _REFERENCE)
    known = [one.name for one in dataclasses.fields(kind)]
    if unknown := sorted(set(given) - set(known)):
        raise ConfigError(
            f"{where} has unknown key {', '.join(map(repr, unknown))}", errors.known_keys(unknown, known)
        )
    return dict(given)


def _check_texts(where: str, given: object) -> None:
    if not isinstance(given, dict) or not all(isinstance(one, str) for one in given.values()):
        raise ConfigError(f"{where} must be an object whose values are columns' names", _REFERENCE)


def _table(where: str, given: object) -> TableName:
    if str(given).endswith(".*"):
        raise ConfigError(f"{where}: {given} is no single table", "name each as schema.name")
    try:
        return TableName.parse(str(given))
    except ValueError as error:
        raise ConfigError(f"{where}: {error}", "name a table as schema.name") from None
