"""The command `pgrepl events try`: prints the events that a publisher would send, without its target.

They are made from recorded changes.
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from airflow_provider_pgrepl.errors import ConfigError, ToolError, TransformError
from airflow_provider_pgrepl.replication.creek.events import CreekEvent
from airflow_provider_pgrepl.replication.creek.wire import Wire
from airflow_provider_pgrepl.replication.events.business import BusinessEvent
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.avro import AvroEvent
from airflow_provider_pgrepl.replication.events.publish.record import read_columns
from airflow_provider_pgrepl.replication.events.reader import OrderedReader
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.events.targets import base
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings
from airflow_provider_pgrepl.replication.settings.targets import TARGETS

from . import process
from .event_makers import converter_factory


def run(pipeline: Pipeline, arguments: argparse.Namespace) -> int:
    """Print one line of JSON for each event, and return the exit code.

    Raises ConfigError, and what reading the changes raises.
    """
    settings = pipeline.publisher(arguments.publisher)
    lsn = _lsn(arguments.lsn)
    limit = arguments.limit if arguments.limit is not None else (20 if lsn is None else None)
    shown = 0
    for event in islice(_events(pipeline, settings, lsn), limit):
        sys.stdout.buffer.write(
            f"{json.dumps(_shown(event, settings), ensure_ascii=False)}\n".encode(errors="backslashreplace")
        )
        shown += 1
    sys.stdout.buffer.flush()
    if not shown:
        where = "" if lsn is None else f" of the transaction at {lsn}"
        sys.stderr.write(f"the publisher would send nothing{where}\n")
    return process.DONE


def _lsn(text: str | None) -> LSN | None:
    try:
        return None if text is None else LSN.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"--lsn: {error}", "give the commit_lsn of a change, as `pgrepl changes` has it"
        ) from None


def _events(pipeline: Pipeline, settings: PublisherSettings, lsn: LSN | None) -> Iterator[Event]:
    initial_columns = read_columns(pipeline.lake_root, settings.name)
    reader = OrderedReader(
        pipeline,
        TableSelection.parse(settings.tables, settings.messages),
        after=None if lsn is None else LSN(max(0, lsn - 1)),
        make=converter_factory(settings, process.hash_salt(settings), _traced, initial_columns),
        whole=settings.whole,
        unchanged=settings.unchanged,
    )
    for batch in reader.read():
        for event in batch:
            if lsn is not None and event.position.commit_lsn > lsn:
                return
            yield event
        if lsn is not None and reader.position.commit_lsn > lsn:
            return


def _traced(transform: Callable[[Any], Iterable[BusinessEvent] | None]) -> Callable[[Any], Any]:
    """Return a transform that prints the trace of its errors to stderr.

    The trace may hold values of changes: the user who tries the transform may see them.
    """

    said = ""

    def try_out(given: Any) -> list[BusinessEvent] | None:
        nonlocal said
        try:
            found = transform(given)
            return None if found is None else list(found)
        except TransformError:
            raise
        except Exception:
            # The reader calls it again with the same input, to find the change that it fails with. Print each
            # trace once.
            found_now = f"{traceback.format_exc()}given {given}\n"
            if found_now != said:
                sys.stderr.write(found_now)
            said = found_now
            raise

    return try_out


def _shown(event: Event, settings: PublisherSettings) -> dict[str, Any]:
    if isinstance(event, CreekEvent):
        return _of_creek(event, settings)
    said = event.business
    kind = TARGETS[settings.target]
    place = getattr(base, kind.place)(event, settings)
    found: dict[str, Any] = {"id": event.id, "table": event.table, "to": place}
    if kind.is_keyed:
        found["key"] = _readable(event.key)
    if said is not None:
        found |= {"type": said.type, "content_type": said.content_type, "headers": dict(said.headers)}
    body = _of_avro(event.body, event.schema.text) if isinstance(event, AvroEvent) else _readable(event.body)
    return {**found, "body": body}


def _of_avro(body: bytes, schema: str) -> Any:
    """Return the row of an Avro message in JSON types. Raises ToolError if fastavro is missing."""
    try:
        from airflow_provider_pgrepl.replication.creek.messages import parsed_schema, row_of
    except ImportError:
        raise ToolError("fastavro, which decodes Avro, is missing", "pip install fastavro") from None
    return json.loads(json.dumps(row_of(body, parsed_schema(schema)), default=str))


def _of_creek(event: CreekEvent, settings: PublisherSettings) -> dict[str, Any]:
    from airflow_provider_pgrepl.replication.avro.codec import long, to_text

    wire = Wire(settings.namespace, settings.database, settings.wire)
    payload = event.unstamped.stamped(int(event.position.commit_lsn), long(0))
    body = _of_avro(payload[10:], to_text(event.envelope.schema))
    found = {"id": event.id, "table": event.table, "to": wire.subject("wal", event.table)}
    return {**found, "body": body}


def _readable(data: bytes | None) -> Any:
    """Return bytes as parsed JSON, or else as text, or else as base64."""
    if data is None:
        return None
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}
    try:
        return json.loads(text)
    except ValueError:
        return text
