"""events/debezium: by columns and one by one the same events are made, whatever the changes are."""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import ConfigError, PgReplError, ValueRangeError
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats import debezium_types
from airflow_provider_pgrepl.replication.events.formats.debezium import DebeziumFormat
from airflow_provider_pgrepl.replication.events.formats.json import KeyedEvents
from airflow_provider_pgrepl.replication.events.relations import TableSelection
from airflow_provider_pgrepl.replication.events.targets.kafka import messages_of
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from airflow_provider_pgrepl.replication.values.parser import UnsupportedValue
from tests.support.examples import examples
from tests.support.histories import Known, Table, histories

_MANY = 1 << 30


def made(tables: list[Table], rows: pa.Table, few: int, *, with_schemas: bool) -> Any:
    known, options = Known(*(one.record for one in tables)), {one.record.name: one.options for one in tables}
    enveloped = DebeziumFormat("shop", 'the "db"', with_schemas=with_schemas)
    events = KeyedEvents(known, options.__getitem__, TableSelection.parse(None), few=few, enveloped=enveloped)
    try:
        return [said(event) for event in events.of(rows)]
    except PgReplError as error:
        return type(error)


def said(event: Event) -> Any:
    """Return the content of an event without its timestamps."""
    bodies = [event.body, event.left[1]] if event.left else [event.body]
    parsed = [json.loads(body) for body in bodies]
    for one in parsed:
        for name in ("ts_ms", "ts_us", "ts_ns"):
            del one.get("payload", one)[name]
    return event.id, event.key, event.left and event.left[0], parsed


@examples(200, *HealthCheck)
@given(histories(), st.booleans())
def test_by_columns_and_one_by_one_are_the_same(history: tuple[list[Table], pa.Table], with_schemas: bool):
    tables, rows = history
    by_columns = made(tables, rows, 0, with_schemas=with_schemas)
    assert by_columns == made(tables, rows, _MANY, with_schemas=with_schemas)


@pytest.mark.parametrize("few", [0, _MANY], ids=["by columns", "one by one"])
def test_value_that_an_update_did_not_send_is_unavailable_and_not_null(few: int):
    texts = (Column(name, place, 25, -1, "text") for place, name in ((2, "tx"), (3, "note")))
    of = (Column("id", 1, 23, -1, "integer", is_key=True), *texts)
    record = RelationRecord.of_catalog(Relation(7, TableName("public", "t"), of))
    row = {"epoch": 1, "commit_lsn": 9, "xid": 3, "commit_ts": 0, "ordinal": 0, "relation_id": 7, "op": "U"}
    row |= {"relation_version": record.version, "new": ["1", None, None], "unchanged": [1]}
    rows = pa.Table.from_pylist([row], schema=ROW_SCHEMA)
    ((_, _, _, (body,)),) = made([Table(record, [], TableOptions())], rows, few, with_schemas=False)
    assert body["after"] == {"id": 1, "tx": "__debezium_unavailable_value", "note": None}


@pytest.mark.parametrize("schemas", [False, True])
def test_messages_of_a_key_that_changes_name_each_others_key(schemas: bool):
    """The deletion the new one, the insertion the old one; a tombstone and other events have neither."""
    of = (Column("id", 1, 23, -1, "integer", is_key=True), Column("note", 2, 25, -1, "text"))
    record = RelationRecord.of_catalog(Relation(7, TableName("public", "t"), of))
    row = {"epoch": 1, "commit_lsn": 9, "xid": 3, "commit_ts": 0, "ordinal": 0, "relation_id": 7, "op": "U"}
    row |= {"relation_version": record.version, "new": ["2", "b"]}
    moved, same = row | {"old": ["1", None]}, row | {"ordinal": 1}
    rows = pa.Table.from_pylist([moved, same], schema=ROW_SCHEMA)
    known, options = Known(record), {record.name: TableOptions()}
    enveloped = DebeziumFormat("shop", "db", with_schemas=schemas)
    made = KeyedEvents(known, options.__getitem__, TableSelection.parse(None), enveloped=enveloped).of(rows)
    given: dict[str, Any] = {"target": "kafka", "format": "debezium", "database": "db"}
    given |= {"schemas": schemas, "tombstones": True, "topic": "{schema}.{table}"}
    settings = parse_publisher("shop", "events", given)
    (deleted, gone, inserted), (updated,) = (messages_of(event, settings, lambda: [0]) for event in made)
    keys = {name: value for name, value in deleted.headers if "debezium" in name}
    assert keys == {"__debezium.newkey": inserted.key}
    assert dict(inserted.headers)["__debezium.oldkey"] == deleted.key == gone.key
    assert [json.loads(one).get("payload", json.loads(one)) for one in (deleted.key, inserted.key)] == [
        {"id": 1},
        {"id": 2},
    ]
    assert not [name for name, _ in (*gone.headers, *updated.headers) if "debezium" in name]
    plain = messages_of(made[0], replace(settings, format="json"), lambda: [0])
    assert not [name for one in plain for name, _ in one.headers if "debezium" in name]


@pytest.mark.parametrize(
    ("encode", "text", "expected"),
    [
        (debezium_types.zoned_moments(-1), "12024-01-01 00:00:00+00", '"+12024-01-01T00:00:00.000000Z"'),
        (debezium_types.zoned_moments(0), "0001-01-01 00:00:00+00 BC", '"0000-01-01T00:00:00Z"'),
        (debezium_types.zoned_moments(6), "0044-03-15 00:00:00.5+00 BC", '"-0043-03-15T00:00:00.500000Z"'),
        (debezium_types.zoned_times, "24:00:00+00", '"00:00:00Z"'),
        (debezium_types.zoned_times, "12:00:00+05:30:15", '"06:29:45Z"'),
        (debezium_types.intervals, "00:00:00", "0"),
        (debezium_types.intervals, "-00:00:01", "-1000000"),
        (debezium_types.decimals(2), "-1.28", '"gA=="'),
        (debezium_types.decimals(2), "1.28", '"AIA="'),
        (debezium_types.free_decimals, "100", '{"scale":0,"value":"ZA=="}'),
        (debezium_types.money, "-$1,234.50", '"/h3G"'),
    ],
)
def test_values_are_written_as_java_does(encode, text, expected):
    assert encode(pa.array([None, text], pa.large_string())).to_pylist() == [None, expected]


def test_a_point_that_is_nowhere_is_json():
    (written,) = debezium_types.points(pa.array(["(NaN,-Infinity)"], pa.large_string())).to_pylist()
    found = json.loads(written, parse_constant=pytest.fail)
    assert (found["x"], found["y"]) == ("NaN", "-Infinity")


@examples(100)
@given(
    st.lists(st.none() | st.integers(debezium_types._FIRST, debezium_types._LAST), max_size=20),
    st.integers(-1, 6),
)
def test_moments_together_are_written_as_each_alone(counts: list[int | None], precision: int):
    step = 10 ** (6 - precision) if precision >= 0 else 1
    whole = [None if count is None else count // step * step for count in counts]
    kept = [None if count is None or count < debezium_types._FIRST else count for count in whole]
    alone = [None if one is None else f'"{debezium_types._zoned(one, precision)}"' for one in kept]
    assert debezium_types._near_moments(pa.array(kept, pa.int64()), precision).to_pylist() == alone


@pytest.mark.parametrize(
    ("encode", "text"),
    [
        (debezium_types.intervals, "@ 1 day"),
        (debezium_types.zoned_times, "12:00"),
        (debezium_types.points, "1,2"),
        (debezium_types.decimals(2), "NaN"),
        (debezium_types.free_decimals, "Infinity"),
    ],
)
def test_debezium_encoder_rejects_unrepresentable_value(encode, text):
    with pytest.raises(UnsupportedValue):
        encode(pa.array([text]))


@pytest.mark.parametrize(
    ("text", "scale", "unscaled"),
    [
        ("9" * 5_000, 0, 10**5_000 - 1),
        (f"-0.{'0' * 4_999}1", 5_000, -1),
        (f"-{'9' * 131_072}.{'9' * 16_383}", 16_383, 1 - 10**147_455),
    ],
    ids=["integer", "fraction", "PostgreSQL's longest"],
)
def test_decimal_of_more_digits_than_python_reads_is_exact(text, scale, unscaled):
    (written,) = debezium_types.free_decimals(pa.array([text], pa.large_string())).to_pylist()
    found = json.loads(written)
    assert found["scale"] == scale
    value = base64.b64decode(found["value"])
    assert int.from_bytes(value, "big", signed=True) == unscaled


@pytest.mark.parametrize("error", [ValueError, OverflowError])
def test_value_on_which_an_encoder_fails_is_of_its_column_alone(error):
    def encode(_: pa.Array) -> pa.Array:
        raise error("the value")

    column = Column("v", 1, 1700, -1, "numeric")
    parser = debezium_types.DebeziumParser({"type": "string"}, encode, None)
    with pytest.raises(ValueRangeError, match="a value that cannot be read") as found:
        debezium_types.DebeziumColumn(column, TableName("public", "t"), 0, parser).parse(pa.array(["1"]))
    assert found.value.message.startswith('column "v" of public.t holds a value')
    assert "the value" not in str(found.value)
    assert found.value.__context__ is None


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"target": "kafka", "format": "debezium"}, "database: is missing"),
        ({"target": "kafka", "database": "shop"}, "database: is of format debezium"),
        ({"target": "kafka", "schemas": True}, "schemas: is of format debezium"),
        (
            {"target": "nats", "database": "shop", "format": "avro"},
            "format: 'avro' is not of target 'nats'",
        ),
        ({"target": "kafka", "format": "xml"}, "'xml' must be one of 'json', 'debezium', 'avro'"),
        ({"target": "rabbitmq", "format": "avro"}, "format: 'avro' is not of target 'rabbitmq'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given, says):
    with pytest.raises(ConfigError, match=says):
        parse_publisher("shop", "p", given)
