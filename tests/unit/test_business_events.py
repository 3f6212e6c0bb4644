"""events/business.py: outbox rows, logical messages and transforms become events of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import ConfigError, DriftError, TransformError
from airflow_provider_pgrepl.replication.app.event_makers import converter_factory
from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.changelog.relations import RelationRecord
from airflow_provider_pgrepl.replication.events.business import BusinessEvent, transform_of
from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.relations import TableGroup, TableSelection
from airflow_provider_pgrepl.replication.events.targets.base import routing_key, topic
from airflow_provider_pgrepl.replication.events.targets.kafka import messages_of
from airflow_provider_pgrepl.replication.events.targets.rabbitmq import unsendable_reason
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Partition, Relation
from airflow_provider_pgrepl.replication.settings.publisher import PublisherSettings, parse_publisher
from airflow_provider_pgrepl.replication.settings.publisher_sections import Outbox
from airflow_provider_pgrepl.replication.settings.tables import TableOptions
from tests.support.histories import Known

Row = Mapping[str, Any]
JSONB, TEXT, INTEGER, BYTEA = 3802, 25, 23, 17


def relation(oid: int, name: str, *columns: tuple[str, int], identity: str = "d") -> RelationRecord:
    """Return a relation whose first column is its key."""
    made = tuple(
        Column(one, place + 1, kind, -1, "any", is_key=not place) for place, (one, kind) in enumerate(columns)
    )
    return RelationRecord.of_catalog(Relation(oid, TableName("public", name), made, identity))


NAMES = ("id", "aggregatetype", "aggregateid", "type")
OUTBOX = relation(1, "outbox", *((name, TEXT) for name in NAMES), ("payload", JSONB))
ORDERS = relation(2, "orders", ("id", INTEGER), ("total", TEXT), ("doc", JSONB))


HEAP = RelationRecord.of_catalog(
    Relation(3, TableName("public", "heap"), (Column("v", 1, TEXT, -1, "text"),), "n")
)


def change(op: str, of: RelationRecord, new: Any = None, old: Any = None, unchanged: Any = None) -> Row:
    return {"op": op, "relation_id": of.message.oid, "relation_version": of.version, "new": new, "old": old,
            "unchanged": unchanged}  # fmt: skip


def message(prefix: str, content: str | None, size: str = "") -> Row:
    new = [prefix, content, size] if content is None else [prefix, content]
    return {"op": "M", "relation_id": 0, "relation_version": 0, "new": new}


def rows_of(*rows: Row) -> pa.Table:
    """Return the rows of one transaction."""
    at = datetime(2026, 1, 2, tzinfo=UTC)
    place = {"epoch": 1, "commit_lsn": 16, "xid": 7, "commit_ts": at}
    made = [{"old": None, "unchanged": None, **place, **row, "ordinal": n} for n, row in enumerate(rows)]
    return pa.Table.from_pylist(made, ROW_SCHEMA)


def made(
    rows: pa.Table,
    target: str = "kafka",
    selection: TableSelection | None = None,
    known: Sequence[RelationRecord] = (),
    **given: Any,
) -> list[Event]:
    settings = settings_of(target, **given)
    wanted = selection or TableSelection.parse(settings.tables, settings.messages)
    found = converter_factory(settings)(Known(OUTBOX, ORDERS, *known), lambda _: TableOptions(), wanted).of(
        rows
    )
    assert all(isinstance(event, Event) for event in found)
    return found


def settings_of(target: str = "kafka", **given: Any) -> PublisherSettings:
    return parse_publisher("shop", "events", {"target": target, **given})


# --- outbox ---

PAID = ["e1", "order", "17", "paid", '{"id": 17, "total": 1.50}']


def test_a_row_of_an_outbox_is_the_event_that_it_says():
    rows = rows_of(change("I", ORDERS, ["17", "1.50", None]), change("I", OUTBOX, PAID))
    plain, event = made(rows, outbox={"table": "public.outbox"})
    assert json.loads(plain.body)["table"] == "public.orders"
    assert event.body == b'{"id": 17, "total": 1.50}'
    assert (event.key, event.id) == (b"17", "1:0/10:1")
    said = event.business
    assert said is not None
    assert (said.route, said.type, said.content_type) == ("order", "paid", "application/json")
    assert said.headers == {"event_id": "e1"}
    assert topic(event, settings_of()) == "shop.order"
    assert routing_key(event, settings_of("rabbitmq")) == "order.paid"


def test_columns_of_an_outbox_are_named_as_one_likes():
    unnamed = dict.fromkeys(("event_id", "route", "key", "type"))
    outbox = {"table": "public.orders", **unnamed, "payload": "doc", "headers": {"amount": "total"}}
    (event,) = made(rows_of(change("I", ORDERS, ["17", "1.50", '"x"'])), outbox=outbox)
    assert (event.body, event.key) == (b'"x"', b'{"id":17}')
    assert event.business is not None
    assert (event.business.route, event.business.type) == ("public.orders", "insert")
    assert event.business.headers == {"amount": "1.50"}


def test_rows_that_are_deleted_from_an_outbox_say_nothing():
    rows = rows_of(change("D", OUTBOX, None, [PAID[0], *[None] * 4]), change("T", OUTBOX))
    assert made(rows, outbox={"table": "public.outbox"}) == []


def test_a_row_of_an_outbox_that_is_changed_is_an_error_without_its_values():
    with pytest.raises(TransformError, match=r"a row of the outbox public\.outbox was updated") as caught:
        made(rows_of(change("U", OUTBOX, PAID)), outbox={"table": "public.outbox"})
    assert "e1" not in str(caught.value)


def test_a_payload_that_is_null_is_an_empty_message():
    (event,) = made(rows_of(change("I", OUTBOX, [*PAID[:4], None])), outbox={"table": "public.outbox"})
    assert event.body == b""


# --- mappings ---


def test_a_mapping_makes_an_object_of_columns():
    mapping = {"ops": ["insert", "delete"], "type": "order.placed", "route": "orders",
               "fields": {"orderId": "id", "document": "doc"}}  # fmt: skip
    rows = rows_of(
        change("I", ORDERS, ["17", "1.50", '{"a":\n[1]}']),
        change("U", ORDERS, ["17", "2.50", None]),
    )
    (event,) = made(rows, transform={"public.orders": mapping})
    assert event.body == b'{"orderId":17,"document":{"a": [1]}}'
    assert event.key == b'{"id":17}'
    assert event.business is not None
    assert (event.business.type, event.business.content_type) == ("order.placed", "application/json")
    assert topic(event, settings_of(route="{route}-{type}")) == "orders-order.placed"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (
            change("D", ORDERS, None, ["17", None, None]),
            'column "total" of public.orders was not sent with a delete',
        ),
        (
            change("U", ORDERS, ["17", None, None], None, [1]),
            'column "total" of public.orders was not sent with an',
        ),
    ],
)
def test_a_value_that_was_not_sent_is_no_null(row, says):
    with pytest.raises(TransformError, match=re.escape(says)):
        made(rows_of(row), transform={"public.orders": {"fields": {"total": "total"}}})


def test_a_column_that_is_not_there_is_named():
    with pytest.raises(TransformError, match=r'public\.orders has no column "totl"'):
        made(
            rows_of(change("I", ORDERS, ["1", "2", None])),
            transform={"public.orders": {"fields": {"x": "totl"}}},
        )


# --- functions ---

HERE = __name__


def two_of_each(one: Change) -> list[BusinessEvent]:
    return [
        BusinessEvent({"n": n, "of": one.data}, key=b"k", type=f"t{n}", headers={"a": "b"}) for n in range(2)
    ]


def nothing(_: Change) -> None:
    return None


def failing(one: Change) -> list[BusinessEvent]:
    raise ValueError(f"secret {one.data}")


def returning_dicts(_: Change) -> list[Any]:
    return [{"a": 1}]


def with_a_number_in_a_header(_: Change) -> list[BusinessEvent]:
    return [BusinessEvent(b"", headers={"n": 1})]  # type: ignore[dict-item]


not_callable = 5


def test_a_function_makes_as_many_events_as_it_likes_each_with_an_id_of_its_own():
    rows = rows_of(*(change("I", ORDERS, [str(n), None, None]) for n in range(2)))
    events = made(rows, transform={"public.orders": f"{HERE}:two_of_each"})
    assert [event.id for event in events] == ["1:0/10:0", "1:0/10:0.1", "1:0/10:1", "1:0/10:1.1"]
    assert json.loads(events[3].body) == {"n": 1, "of": {"id": 1, "total": None, "doc": None}}
    assert events[3].key == b"k"
    assert events[3].business is not None
    assert (events[3].business.route, events[3].business.type) == ("public.orders", "t1")


def test_a_function_may_make_nothing_of_a_change():
    assert made(rows_of(change("T", ORDERS)), transform={"public.orders": f"{HERE}:nothing"}) == []


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ("failing", "failed: ValueError"),
        ("returning_dicts", "not a BusinessEvent"),
        ("with_a_number_in_a_header", "must be strings"),
    ],
)
def test_a_function_that_fails_stops_its_table_and_shows_no_value(function, says):
    with pytest.raises(TransformError, match=says) as caught:
        made(
            rows_of(change("I", ORDERS, ["1", "x", None])), transform={"public.orders": f"{HERE}:{function}"}
        )
    assert "secret" not in f"{caught.value}{caught.value.__context__}{caught.value.__cause__}"
    assert "events try" in caught.value.hint


def test_a_detached_partition_of_a_transformed_table_is_not_sent_as_it_is():
    part, transform = relation(4, "orders_1", ("id", INTEGER)), {"public.orders": f"{HERE}:nothing"}
    assert ORDERS.catalog is not None
    partitions = (Partition(part.message.oid, part.name, 1),)
    whole = RelationRecord.of_catalog(replace(ORDERS.catalog, partitions=partitions))
    rows = rows_of(change("I", part, ["1"]))
    with pytest.raises(DriftError, match=r"has settings for public\.orders alone"):
        made(rows, known=(part, whole), transform=transform)
    assert len(made(rows, known=(part,), transform=transform)) == 1


# --- logical messages ---


def test_messages_are_events_in_their_place_among_changes():
    rows = rows_of(
        change("I", ORDERS, ["1", None, None]),
        message("orders", "\\x7b7d"),
        message("others", "\\x00"),
        change("D", ORDERS, None, ["1", None, None]),
        message("pgrepl.ddl", "\\x00"),
    )
    insert, event, delete = made(rows, messages=["orders"])
    assert (insert.op, delete.op) == ("insert", "delete")
    assert (event.body, event.id, event.key) == (b"{}", "1:0/10:1", b'{"prefix":"orders"}')
    assert topic(event, settings_of()) == "shop.orders"
    for route in ("{route}.{type}", "{type}.{route}", "{route}{type}"):
        assert routing_key(event, settings_of("rabbitmq", route=route)) == "orders"
    assert [one.body for one in made(rows, tables=[], messages=["*"])] == [b"{}", b"\x00"]
    assert made(rows, tables=["public.outbox"]) == []


def test_messages_can_be_left_out_and_taken_alone_like_a_table():
    rows = rows_of(change("I", ORDERS, ["1", None, None]), message("orders", "\\x7b7d"))
    wanted = TableSelection.parse(None, ["*"])
    without = made(rows, selection=wanted.leaving_out(TableGroup(frozenset({0}))), messages=["*"])
    assert [event.table for event in without] == ["public.orders"]
    alone = made(rows, selection=wanted.taking_only(TableGroup(frozenset({0}))), messages=["*"])
    assert [event.table for event in alone] == ["logical messages"]


def test_a_message_whose_content_was_not_kept_is_an_error():
    with pytest.raises(TransformError, match="'orders' was larger than message_bytes") as caught:
        made(rows_of(message("orders", None, "99")), messages=["*"])
    assert "set on_error of the publisher to skip_and_record" in caught.value.hint


# --- settings ---


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"outbox": {"tabel": "a.b"}}, "outbox.tabel: unknown key"),
        ({"outbox": {"event_id": "x"}}, "outbox.table: is missing"),
        ({"outbox": {"table": "outbox"}}, "outbox.table: 'outbox' is not a schema-qualified"),
        ({"outbox": {"table": "a.b", "payload": None}}, "outbox.payload: None must be a string"),
        ({"outbox": {"table": "a.b", "headers": ["x"]}}, "outbox.headers: ['x'] must be an object"),
        (
            {"outbox": {"table": "a.b", "headers": {"type": "x"}}},
            "headers: 'type' is a header that the publisher",
        ),
        ({"outbox": {"table": "a.b", "headers": {"ce_id": "x"}}}, "headers: 'ce_id' is a header"),
        ({"outbox": {"table": "a.b", "headers": {"CC": "x"}}}, "headers: 'CC' is a header"),
        ({"outbox": {"table": "a.b", "event_id": ""}}, "outbox.event_id: must be a column's name"),
        ({"transform": {"a.b": "a..b:c"}}, "'a..b:c' is not the location of a function"),
        ({"messages": ["m"], "route": "x.{type}"}, "logical messages have a {route}, and no {type}"),
        (
            {"outbox": {"table": "a.b"}, "transform": {"a.b": "m:f"}},
            "a.b is named by outbox and by transform",
        ),
        ({"transform": {"a.b": "module.function"}}, "'module.function' is not the location of a function"),
        ({"transform": {"a.b": 5}}, "5 must be a string or an object"),
        ({"transform": {"a.b": {"fields": {}}}}, 'transform["a.b"].fields: is empty'),
        (
            {"transform": {"a.b": {"fields": {"x": "y"}, "ops": ["upsert"]}}},
            "ops[0]: 'upsert' must be one of 'insert', 'update', 'delete'",
        ),
        ({"transform": {"a.b": {"fields": {"x": "y"}, "type": 1}}}, "type: 1 must be a string"),
        ({"route": "events"}, "route: 'events' names neither"),
        ({"tables": []}, "tables: none is named"),
    ],
)
def test_settings_that_cannot_be_are_refused(given, says):
    with pytest.raises(ConfigError, match=rf"publishers\.events\..*{re.escape(says)}"):
        settings_of(**given)


def test_creeks_wire_has_no_business_events():
    with pytest.raises(ConfigError, match="outbox: is not of creek's format"):
        settings_of("nats", database="shop", outbox={"table": "a.b"})


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("no_such_module_:f", "cannot be imported: ModuleNotFoundError"),
        (f"{HERE}:no_such", "cannot be imported: AttributeError"),
        (f"{HERE}:not_callable", "is not a function"),
    ],
)
def test_a_function_that_is_not_there_is_said_at_the_start(place, says):
    with pytest.raises(ConfigError, match=says):
        converter_factory(settings_of(transform={"a.b": place}))


def test_event_with_too_long_type_or_routing_key_is_reported_as_unsendable():
    rows = rows_of(change("I", OUTBOX, ["e1", "order", "17", "x" * 256, "{}"]))
    (event,) = made(rows, "rabbitmq", outbox={"table": "public.outbox"}, route="{route}")
    settings = settings_of("rabbitmq", route="{route}")
    assert "type or header is longer than the 255 bytes" in unsendable_reason(event, settings)
    assert "routing key is longer" in unsendable_reason(event, settings_of("rabbitmq"))
    assert unsendable_reason(replace(event, business=None), settings) == ""


# --- messages of Kafka ---


def test_rows_without_a_key_have_none_with_debeziums_sinks_and_keep_their_order():
    given = {"format": "debezium", "database": "shop"}
    (event,) = made(rows_of(change("I", HEAP, ["v"])), known=(HEAP,), **given)
    (message,) = messages_of(event, settings_of(**given), lambda: [0, 1])
    assert (message.key, message.partition) == (None, 0)
    (truncate,) = made(rows_of(change("T", HEAP)), known=(HEAP,), **given)
    found = messages_of(truncate, settings_of(**given), lambda: [0, 1])
    assert [(one.key, one.partition) for one in found] == [(None, 0), (None, 1)]
    (event,) = made(rows_of(change("I", HEAP, ["v"])), known=(HEAP,))
    (message,) = messages_of(event, settings_of(), lambda: [0, 1])
    assert (message.key, message.partition) == (b'{"table":"public.heap"}', -1)


def test_delete_message_for_old_key_has_separate_id_and_headers():
    (event,) = made(rows_of(change("I", HEAP, ["v"])), known=(HEAP,))
    moved = replace(event, key=b"2", left=(b"1", b"{}"))
    left, own = messages_of(moved, settings_of(cloudevents=True), lambda: [0])
    said = dict(left.headers)
    assert (said["id"], said["op"], said["ce_id"]) == (f"{event.id}:old", "delete", f"{event.id}:old")
    assert dict(own.headers)["ce_id"] == event.id
    assert [name for name, _ in left.headers] == [name for name, _ in own.headers]


def test_an_id_of_several_events_of_a_change_is_a_place_before_all_of_them_but_the_first():
    assert EventPosition.parse("1:0/10:4.2") == EventPosition(Epoch(1), LSN(16), 3)
    assert EventPosition.parse("1:0/10:4") == EventPosition(Epoch(1), LSN(16), 4)


def test_headers_of_an_outbox_are_texts_as_json_has_them():
    at = datetime(2024, 1, 2, tzinfo=UTC)
    row = {"payload": "p", "b": True, "at": at, "by": b"\xff", "a": [1, None], "n": None}
    outbox = Outbox(
        TableName("public", "o"), None, None, None, "b", headers={name: name for name in row if name != "b"}
    )
    transform = transform_of(outbox)
    place = EventPosition(Epoch(1), LSN(16), 4)
    (event,) = transform(Change(place, "public.o", "insert", row, None, (), 7, datetime.now(UTC))) or ()
    assert event.type == "true"
    assert event.headers == {
        "payload": "p",
        "at": "2024-01-02T00:00:00Z",
        "by": "/w==",
        "a": "[1,null]",
    }
