"""The recorded history of a pipeline, as text and as JSON: its events, or its samples."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, one_line
from airflow_provider_pgrepl.replication.app.operations.selection import choose
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.runtime.quantities import show_table
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from airflow_provider_pgrepl.replication.state.recorded_events import RecordedEvent
from airflow_provider_pgrepl.replication.state.samples import Sample, TableSample

from . import process
from .access import not_recorded

Rows = Sequence[RecordedEvent] | Sequence[Sample] | Sequence[TableSample]
_AGO = re.compile(r"(\d{1,6})([mhd])")
_UNITS = {"m": "minutes", "h": "hours", "d": "days"}


def read_history(
    pipeline: Pipeline,
    table: str | None = None,
    since: str | None = None,
    limit: int = 100,
    *,
    samples: bool = False,
) -> Rows:
    """Return the newest recorded events or samples of a pipeline, or of one of its tables, oldest first.

    Writes nothing, and needs neither source nor lake. Raises ConfigError for an invalid argument, and if
    there are no rows of a table that the pipeline does not have. Raises StateError if the state is not set up
    or of an older version.

    :param since: a timestamp in ISO 8601, in UTC unless it has an offset; or `30m`, `24h`, `7d`
    """
    name, begin = None if table is None else _parse(table), None if since is None else _since(since)
    if limit < 1:
        raise ConfigError(f"--limit: {limit} is not positive", "give the number of rows to print")
    with StateDatabase(process.state_dsn(), f"history {pipeline.name}") as state_db:
        if not state_db.is_set_up():
            raise not_recorded(pipeline.name)
        found: Rows
        if not samples:
            found = state_db.read_events(pipeline.name, name, begin, limit)
        elif name is None:
            found = state_db.read_samples(pipeline.name, begin, limit)
        else:
            found = state_db.read_table_samples(pipeline.name, name, begin, limit)
        if name is not None and not found and state_db.read_pipeline(pipeline.name) is not None:
            choose(state_db, pipeline.name, [name])
        return found


def _parse(table: str) -> TableName:
    try:
        return TableName.parse(table)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _since(text: str) -> datetime:
    try:
        if found := _AGO.fullmatch(text):
            return datetime.now(UTC) - timedelta(**{_UNITS[found[2]]: int(found[1])})
        given = datetime.fromisoformat(text)
    except (ValueError, OverflowError):
        raise ConfigError(
            f"--since: {text!r} is neither a timestamp nor a duration",
            "give it as 2026-01-31T12:00:00Z, 30m, 24h or 7d",
        ) from None
    return given if given.tzinfo else given.replace(tzinfo=UTC)


def to_json(found: Rows) -> str:
    """Return the rows as a JSON array of objects, whose keys are the names of the fields."""
    return json.dumps([_object(one) for one in found], indent=2)


def _object(one: RecordedEvent | Sample | TableSample) -> dict[str, Any]:
    return {field.name: _json_value(getattr(one, field.name)) for field in fields(one)}


def _json_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    return str(value) if isinstance(value, TableName | LSN) else value


def to_text(found: Rows) -> str:
    """Return the rows as text for people: an event in one line, with its error and actor below it; samples as
    a table."""
    if not found:
        return "nothing is recorded"
    events = [one for one in found if isinstance(one, RecordedEvent)]
    if events:
        return "\n".join(line for event in events for line in _lines(event))
    objects = [_object(one) for one in found]
    return "\n".join(show_table([list(objects[0]), *(_cells(one) for one in objects)]))


def _lines(event: RecordedEvent) -> Iterable[str]:
    what = event.kind
    if event.to_state is not None:
        what = f"{event.from_state or 'new'} → {event.to_state}"
    facts = [f"{name} {_fact(value)}" for name, value in event.details.items()]
    position = [] if event.lsn is None else [f"at {event.lsn}"]
    subject = "pipeline" if event.table is None else str(event.table)
    yield f"{_time(event.time)}  {subject}  {', '.join([what, *position, *facts])}"
    if event.error or event.reason:
        yield f"    {': '.join(filter(None, (event.error, one_line(event.reason))))}"
    if event.hint:
        yield f"      hint: {one_line(event.hint)}"
    yield f"    {event.actor}"


def _fact(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _time(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M:%SZ}"


def _cells(one: dict[str, Any]) -> list[str]:
    return [
        _time(datetime.fromisoformat(value)) if name == "time" else _cell(value)
        for name, value in one.items()
    ]


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
