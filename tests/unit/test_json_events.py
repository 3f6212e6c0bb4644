"""events/formats/json.py: a body that is made from columns is what to_json makes of the change."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import DriftError, PgReplError, ValueRangeError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.json import JsonEvents
from airflow_provider_pgrepl.replication.events.formats.json_text import json_texts, json_value, on_one_line
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, PgType, Relation
from airflow_provider_pgrepl.replication.settings.tables import ColumnOptions, TableOptions
from airflow_provider_pgrepl.replication.values.text_output import DAY_US
from tests.support.examples import examples
from tests.support.histories import FIRST_DAY, JSONB, LAST_DAY, TEXT, TYPES, Known, Table, histories

COMPARED = ("body", "id", "position", "table", "op", "commit_ts", "relation_id", "generation")


def made(make: Callable[[], list[Event]]) -> Any:
    """Return the compared attributes of each event, or class, message and hint of the error."""
    try:
        return [[getattr(event, name) for name in COMPARED] for event in make()]
    except PgReplError as error:
        return type(error), error.message, error.hint


def both(tables: list[Table], rows: pa.Table) -> tuple[Any, Any]:
    """Return the events made from columns, and those made from Python's objects."""
    known = Known(*(table.record for table in tables))
    options = {table.record.name: table.options for table in tables}
    given = (known, options.__getitem__, TableSelection.parse(None))
    return (
        made(lambda: JsonEvents(*given, few=0).of(rows)),
        made(lambda: JsonEvents(*given, few=1 << 30).of(rows)),
    )


@examples(300, *HealthCheck)
@given(histories())
def test_a_body_from_columns_is_what_to_json_makes_of_the_change(history: tuple[list[Table], pa.Table]):
    """With several errors the two ways may raise different ones; a reader reports the first change's."""
    tables, rows = history
    found, expected = both(tables, rows)
    if isinstance(expected, list):
        assert found == expected
        assert all(json.loads(event[0]) for event in found)
        return
    assert found[0] is expected[0]
    for number in range(rows.num_rows):
        found, expected = both(tables, rows.slice(number, 1))
        assert found == expected


@examples(100, *HealthCheck)
@given(st.data())
def test_each_type_alone_is_written_as_python_writes_it(data: st.DataObject):
    one = data.draw(st.sampled_from(TYPES))
    table = table_of(one.of)
    texts = data.draw(st.lists(st.none() | one.texts, min_size=1, max_size=40))
    found, expected = both([table], rows_of(table, *texts))
    assert found == expected


@pytest.mark.parametrize("of", [TEXT, JSONB], ids=["text", "jsonb"])
def test_each_character_alone_is_written_as_python_writes_it(of: PgType):
    """The column also has plain values: a column in which any value needs escaping is written another way."""
    table = table_of(of)
    for number in [*range(1, 0x100), *range(0x2020, 0x2030), 0xFFFD, 0x1F4A1]:
        found, expected = both([table], rows_of(table, "plain", f"a{chr(number)}b", None))
        assert found == expected, hex(number)


def table_of(of: PgType, choice: ColumnOptions | None = None) -> Table:
    column = Column("c", 1, of.oid, of.typmod, of.name, of.kind, type=of)
    record = RelationRecord.of_catalog(Relation(16_400, TableName("public", "t"), (column,)))
    return Table(record, [], TableOptions(columns={"c": choice or ColumnOptions()}))


def rows_of(table: Table, *texts: str | None) -> pa.Table:
    place = {"epoch": 1, "commit_lsn": 7, "xid": 9, "commit_ts": datetime(2026, 1, 1, tzinfo=UTC), "op": "I"}
    of = {"relation_id": table.record.message.oid, "relation_version": table.record.version}
    rows = [{**place, **of, "ordinal": ordinal, "new": [text]} for ordinal, text in enumerate(texts)]
    return pa.Table.from_pylist(rows, schema=ROW_SCHEMA)


@pytest.mark.parametrize(
    ("of", "text"),
    [(one.of, text) for one in TYPES for text in one.faulty],
    ids=lambda value: value.name if isinstance(value, PgType) else value[:12],
)
def test_a_value_that_cannot_be_held_is_the_same_error_and_stays_unsaid(of: PgType, text: str):
    table = table_of(of)
    found, expected = both([table], rows_of(table, None, text))
    assert found == expected
    assert found[0] is ValueRangeError
    assert len(text) < 9 or text not in " ".join(found[1:])


@pytest.mark.parametrize("oid", [25, 114, 3802])
@pytest.mark.parametrize("data", [b"\xff", b"a\xed\xa0\x80", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\xe2\x80"])
def test_bytes_that_are_no_text_are_the_same_error(oid: int, data: bytes):
    """A database of encoding SQL_ASCII takes any bytes."""
    table = table_of(PgType(oid, name="text"))
    buffers = [None, pa.py_buffer(np.array([0, len(data)], np.int64)), pa.py_buffer(data)]
    texts = pa.Array.from_buffers(pa.large_string(), 1, buffers)
    rows = rows_of(table, "")
    lists = pa.LargeListArray.from_arrays(pa.array([0, 1]), texts)
    rows = rows.set_column(rows.schema.get_field_index("new"), "new", lists)
    found, expected = both([table], rows)
    assert found == expected
    assert found[0] is ValueRangeError


def test_a_row_of_another_width_is_the_same_error():
    table = table_of(TEXT)
    rows = rows_of(table, "a", "b")
    wide = pa.array([["a"], ["b", "c"]], pa.large_list(pa.large_string()))
    found, expected = both([table], rows.set_column(rows.schema.get_field_index("new"), "new", wide))
    assert found == expected
    assert found[0] is DriftError


def test_few_changes_and_many_are_the_same_events():
    table = table_of(TEXT)
    rows = rows_of(table, *(f'"{number}' for number in range(100)))
    known = Known(table.record)
    events = JsonEvents(known, lambda _: table.options, TableSelection.parse(None))
    split = [event for start in range(0, 100, 10) for event in events.of(rows.slice(start, 10))]
    assert events.of(rows) == split


@pytest.mark.parametrize("kind", [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32()])
def test_the_first_and_the_last_moment_of_python_are_written_and_no_others(kind: pa.DataType):
    is_date = kind == pa.date32()
    counted, unit = (pa.int32(), 1) if is_date else (pa.int64(), DAY_US)
    first, last = FIRST_DAY * unit, (LAST_DAY + 1) * unit - 1
    within = pa.array([first, None, last], counted).view(kind)
    expected = [on_one_line(json_value(value)) for value in within.to_pylist()]
    assert json_texts(within, is_json=False).to_pylist() == [
        None if one == "null" else one for one in expected
    ]
    for count in (first - 1, last + 1):
        values = pa.array([count], counted).view(kind)
        with pytest.raises(OverflowError):
            values.to_pylist()
        with pytest.raises(OverflowError):
            json_texts(values, is_json=False)
