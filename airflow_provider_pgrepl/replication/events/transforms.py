"""Transforms: what rules of a publisher's settings make of a table's changes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, TransformError, one_line
from airflow_provider_pgrepl.replication.events.business_event import BusinessEvent, Transform
from airflow_provider_pgrepl.replication.events.change import Change
from airflow_provider_pgrepl.replication.events.formats.json_format import json_value
from airflow_provider_pgrepl.replication.settings.business_events import FieldMapping, Outbox, Rule
from airflow_provider_pgrepl.trace import traced

_UNSENT_HINT = "have the server send it: ALTER TABLE … REPLICA IDENTITY FULL, or STORAGE PLAIN of the column"


def transform_of(rule: Rule) -> Transform:
    """Raises ConfigError for a function that cannot be imported."""
    if isinstance(rule, Outbox):
        return lambda change: _of_outbox(rule, change)
    if isinstance(rule, FieldMapping):
        return lambda change: _of_fields(rule, change)
    function: Transform = imported(rule)
    return function


def _of_outbox(outbox: Outbox, change: Change) -> Iterator[BusinessEvent]:
    """Rows are deleted once they are of no use any more; to change one says nothing."""
    if change.op in ("delete", "truncate"):
        return
    if change.op == "update":
        raise TransformError(
            f"a row of the outbox {change.table} was updated, and its event was sent before",
            "insert another row instead; with on_error: skip_and_record such updates are passed over",
        )
    row = change.data or {}
    payload = _value(change, row, outbox.payload)
    yield BusinessEvent(
        _body(payload),
        _value(change, row, outbox.key),
        _text(change, row, outbox.route),
        _text(change, row, outbox.type),
        _text(change, row, outbox.id),
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
        body = {name: _value(change, row, column) for name, column in mapping.fields.items()}
        key = None if mapping.key is None else _value(change, row, mapping.key)
        yield BusinessEvent(body, key, mapping.route, mapping.type)


def _value(change: Change, row: Mapping[str, Any], column: str | None) -> Any:
    """Of a column, which must be there; of a delete only the key's are, without REPLICA IDENTITY FULL."""
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
        "mend outbox or transform of the publisher",
    )


def _article(op: str) -> str:
    return f"an {op}" if op[0] in "aeiou" else f"a {op}"


class Json(str):
    """A text that is JSON already."""

    __slots__ = ()


def _text(change: Change, row: Mapping[str, Any], column: str | None) -> str:
    value = _value(change, row, column)
    if value is None or isinstance(value, str):
        return value or ""
    made = json_value(value)
    return str(json.loads(made)) if made.startswith('"') else made


def _body(payload: Any) -> Any:
    return b"" if payload is None else payload


def _content_type(change: Change, column: str, payload: Any) -> str:
    if column in change.json_columns:
        return "application/json"
    return "application/octet-stream" if isinstance(payload, bytes) else "text/plain"


def imported(place: str) -> Any:
    """A function, by `module:function`. Raises ConfigError."""
    module, _, name = place.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:  # noqa: BLE001 - whatever a user's module raises when it is imported
        failed = ConfigError(
            f"transform: {place} cannot be imported: {type(error).__name__}: {one_line(str(error))}",
            "the module must be importable where the publisher runs: install it, or put it on PYTHONPATH",
        )
        raise traced(failed, error) from None
    if not callable(found):
        raise ConfigError(f"transform: {place} is no function")
    return found
