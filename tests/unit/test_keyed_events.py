"""events/formats/json.py: keys made from columns are those made of each change."""

from __future__ import annotations

import json

import pyarrow as pa
from hypothesis import HealthCheck, given

from airflow_provider_pgrepl.errors import PgReplError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.json import KeyedEvents
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from tests.support.examples import examples
from tests.support.histories import Known, Table, histories

_MANY = 1 << 30


def made(tables: list[Table], rows: pa.Table, few: int) -> list[Event] | type[PgReplError]:
    known = Known(*(table.record for table in tables))
    options = {table.record.name: table.options for table in tables}
    try:
        return KeyedEvents(known, options.__getitem__, TableSelection.parse(None), few=few).of(rows)
    except PgReplError as error:
        return type(error)


@examples(300, *HealthCheck)
@given(histories())
def test_by_columns_and_one_by_one_are_the_same(history: tuple[list[Table], pa.Table]):
    tables, rows = history
    assert made(tables, rows, few=0) == made(tables, rows, few=_MANY)


@examples(200, *HealthCheck)
@given(histories())
def test_each_key_has_what_its_partition_must_know(history: tuple[list[Table], pa.Table]):
    """A row is deleted under the key that it had, and is what it is under the key that it has."""
    tables, rows = history
    events = made(tables, rows, few=0)
    if not isinstance(events, list):
        return
    for event in events:
        body = json.loads(event.body)
        if event.op == "truncate":
            assert (event.key, event.left) == (None, None)
        elif event.key is not None:
            key, row = json.loads(event.key), body["data"] if body["data"] is not None else body["old"]
            unsent = body.get("unchanged", ())
            assert key.items() <= {**key, **row}.items()
            assert all(name in row or name in unsent for name in key)
        if event.left is not None:
            assert event.op == "insert"
            assert event.left[0] != event.key
            left = json.loads(event.left[1])
            assert (left["op"], left["data"]) == ("delete", None)
            assert json.loads(event.left[0]).items() <= left["old"].items()
