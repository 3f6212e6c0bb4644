"""Column rules, business events and CloudEvents at a real broker; `pgrepl events try` without one."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

import pytest
from cloudevents.core.bindings.rabbitmq import RabbitMQMessage, from_binary
from cloudevents.core.formats.json import JSONFormat

from airflow_provider_pgrepl.__main__ import main as pgrepl
from airflow_provider_pgrepl.errors import ConfigError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.changelog.gaps import Gap, record_gap
from airflow_provider_pgrepl.replication.events.business import BusinessEvent
from airflow_provider_pgrepl.replication.events.changes import Change
from airflow_provider_pgrepl.replication.pgoutput.columns import TransactionBegin
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.published import Published
from tests.support.rabbitmq import Message
from tests.support.replicated import execute

HERE = __name__
SALT = "a long secret"


def changed(published: Published, *statements: str, code: int = process.DONE) -> list[Message]:
    """Run statements, receive and publish them, and return the messages of the queue."""
    execute(published.dsn, *statements)
    published.receive()
    return published.publish(code=code)


# --- column rules ---


def test_hidden_columns_stay_hidden_through_renames_and_restarts(published, monkeypatch):
    monkeypatch.setenv(process.SALT_VARIABLE, SALT)
    published.publisher(
        tables=["public.*"],
        hash_columns=["public.t.v"],
        exclude_columns=["public.t.price"],
        rename_columns={"public.t.id": "number"},
    )
    (first,) = changed(published, "insert into t values (1, 'ä@b.c', 1.5)")
    hashed = hashlib.sha256(f"{SALT}ä@b.c".encode()).hexdigest()
    assert first.event["data"] == {"number": 1, "v": hashed, "at": None}
    found = changed(
        published,
        "alter table t rename v to mail; alter table t rename price to cost",
        "update t set cost = 2",
        "alter table t rename to people",
        "insert into people values (2, 'ä@b.c', 1.5)",
    )
    assert [one.event["data"] for one in found] == [
        {"number": 1, "mail": hashed, "at": None},
        {"number": 2, "mail": hashed, "at": None},
    ]
    (last,) = changed(published, "update people set cost = 3 where id = 2")
    assert last.event["data"] == {"number": 2, "mail": hashed, "at": None}


def test_a_rule_that_names_no_column_stops_its_table_before_anything_of_it_is_sent(published):
    published.publisher(exclude_columns=["public.t.vv"])
    found = changed(
        published,
        "insert into t values (1, 'secret')",
        "insert into other values (1)",
        code=process.WILL_NOT_HELP,
    )
    assert [one.event["table"] for one in found] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert (stopped.table, stopped.error) == ("public.t", "DriftError")
    assert "public.t.vv" in stopped.reason
    published.publisher(exclude_columns=["public.t.v"])
    assert [one.event["data"] for one in published.publish()] == [{"id": 1, "price": None, "at": None}]


def test_rules_that_would_hide_nothing_are_refused_at_the_start(published, caplog):
    execute(published.dsn, "insert into t values (1, 'secret')")
    published.receive()
    for given, says in (
        ({"hash_columns": ["public.t.v"]}, "PGREPL_HASH_SALT is not set"),
        ({"exclude_columns": ["public.tt.v"]}, "rules for columns of public.tt"),
    ):
        published.publisher(**given)
        assert published.publish(code=process.WILL_NOT_HELP) == [], given
        assert says in caplog.text


# --- business events ---

OUTBOX = (
    "create table outbox(id uuid primary key default gen_random_uuid(), aggregatetype text, aggregateid text,"
    " type text, payload jsonb, tenant text)"
)


@pytest.fixture
def with_outbox(dsn: str, published: Published) -> Published:
    execute(dsn, OUTBOX, f"alter publication {published.pipeline.publication} add table outbox")
    published.configure(tables=(*published.pipeline.tables, "public.outbox"))
    return published


def test_an_outbox_and_messages_are_sent_in_order_with_the_changes(with_outbox):
    with_outbox.publisher(
        tables=["public.outbox", "public.t"],
        outbox={"table": "public.outbox", "headers": {"tenant": "tenant"}},
        messages=["orders"],
        cloudevents=True,
    )
    found = changed(
        with_outbox,
        "begin; insert into t values (1);"
        "insert into outbox(aggregatetype, aggregateid, type, payload, tenant)"
        """ values ('order', '17', 'paid', '{"id": 17}', 'north');"""
        "select pg_logical_emit_message(true, 'orders', '{}'); delete from outbox; commit",
        "select pg_logical_emit_message(false, 'orders', 'now')",
        "select pg_logical_emit_message(false, 'others', 'no')",
    )
    assert [one.routing_key for one in found] == ["public.t.insert", "order.paid", "orders", "orders"]
    assert [one.body for one in found[1:]] == [b'{"id": 17}', b"{}", b"now"]
    assert [one.position for one in found] == sorted(one.position for one in found)
    paid = found[1]
    headers = paid.properties.headers or {}
    assert (headers["tenant"], paid.properties.type) == ("north", "paid")
    assert with_outbox.publish() == []
    assert_cloud_events(found, with_outbox.pipeline.name, headers["event_id"])


def assert_cloud_events(found: list[Message], source: str, own_id: str) -> None:
    """Check the events as the CloudEvents SDK reads them."""
    events = []
    for one in found:
        headers = {name: str(value) for name, value in (one.properties.headers or {}).items()}
        message = RabbitMQMessage(headers, one.properties.content_type, one.body)
        events.append(from_binary(message, JSONFormat()))
    assert [event.get_type() for event in events] == [f"{source}.public.t.insert", "paid", "orders", "orders"]
    assert [event.get_id() for event in events] == [found[0].id, own_id, found[2].id, found[3].id]
    assert {event.get_source() for event in events} == {f"/{source}"}
    assert events[0].get_data() == found[0].event
    assert ["ce-time" in (one.properties.headers or {}) for one in found] == [True, True, True, False]


def total_of(change: Change) -> list[BusinessEvent]:
    """A transform that fails for a row without price."""
    assert change.data is not None
    return [BusinessEvent({"total": str(change.data["price"] + 0)}, type="total", route="sums")]


def test_a_transform_that_fails_stops_its_table_alone_which_goes_on_when_it_is_mended(published):
    published.publisher(transform={"public.t": f"{HERE}:total_of"})
    found = changed(
        published,
        *("insert into t values (1, '', 1.5)", "insert into t values (2)", "insert into other values (1)"),
        "insert into t values (3, '', 3)",
        code=process.WILL_NOT_HELP,
    )
    assert [one.routing_key for one in found] == ["sums.total", "public.other.insert"]
    (stopped,) = published.record.stopped.values()
    assert (stopped.table, stopped.error) == ("public.t", "TransformError")
    assert "TypeError" in stopped.reason
    mapping = {"fields": {"price": "price"}, "type": "total", "route": "sums"}
    published.publisher(transform={"public.t": mapping})
    assert [one.body for one in published.publish()] == [b'{"price":null}', b'{"price":"3.00"}']


@pytest.mark.thorough("test_publishing: a gap stops the tables that it may have changed")
def test_messages_stop_alone_where_a_transaction_was_skipped(published):
    published.publisher(messages=["*"])
    message = "select pg_logical_emit_message(true, 'orders', '{}')"
    assert len(changed(published, message)) == 1
    lsn = LSN(published.durable_lsn + 8)
    begun = TransactionBegin(lsn, 99, int(datetime.now(UTC).timestamp() * 1_000_000))
    record_gap(published.pipeline.lake_root, Gap(begun, frozenset(), "too large"), None)
    found = changed(published, "insert into t values (1)", message, code=process.WILL_NOT_HELP)
    assert [one.routing_key for one in found] == ["public.t.insert"]
    (stopped,) = published.record.stopped.values()
    assert (stopped.table, stopped.error) == ("logical messages", "GapError")
    published.publisher(messages=["*"], on_error="skip_and_record")
    assert [one.routing_key for one in published.publish()] == ["orders"]
    assert (published.record.stopped, published.record.skipped) == ({}, 1)


FAILURES: list[bool] = []


def fails_once(change: Change) -> list[BusinessEvent]:
    """Fail once, as a transform that calls a temporarily unavailable service."""
    if change.data and change.data["id"] == 4 and not FAILURES:
        FAILURES.append(True)
        raise ConnectionError("away")
    return [BusinessEvent({"id": (change.data or {})["id"]})]


def test_a_transform_that_fails_once_loses_nothing(published):
    FAILURES.clear()
    published.publisher(transform={"public.t": f"{HERE}:fails_once"})
    found = changed(published, *(f"insert into t values ({number})" for number in range(1, 9)))
    assert [one.event["id"] for one in found] == list(range(1, 9))
    assert (published.record.stopped, published.record.skipped) == ({}, 0)


MADE: dict[str, BusinessEvent] = {
    "an object": BusinessEvent(object()),
    "an object as key": BusinessEvent({}, key=object()),
    "half a pair in the body": BusinessEvent("\ud800"),
    "half a pair in the route": BusinessEvent({}, route="a\ud800"),
    "half a pair in a header": BusinessEvent({}, headers={"h": "\udfff"}),
    "NUL in a header's name": BusinessEvent({}, headers={"h\0x": "v"}),
    "headers of more than a frame": BusinessEvent({}, headers={f"h{n}": "x" * 250 for n in range(600)}),
}
KIND = ""


def makes_one_of_them(_: Change) -> list[BusinessEvent]:
    return [MADE[KIND]]


@pytest.mark.thorough("test_a_transform_that_fails_stops_its_table_alone_which_goes_on_when_it_is_mended")
def test_an_event_that_cannot_be_sent_stops_its_table_alone(published, monkeypatch):
    published.publisher(transform={"public.t": f"{HERE}:makes_one_of_them"})
    execute(published.dsn, "insert into t values (1)", "insert into other values (1)")
    published.receive()
    for kind in MADE:
        monkeypatch.setattr(f"{HERE}.KIND", kind)
        found = published.publish("--after", "0/1", code=process.WILL_NOT_HELP)
        assert [one.routing_key for one in found] == ["public.other.insert"], kind
        (stopped,) = published.record.stopped.values()
        assert stopped.table == "public.t", kind


def plain_values(_: Change) -> list[BusinessEvent]:
    return [BusinessEvent({"id": UUID(int=7)}), BusinessEvent(bytearray(b"abc"))]


def test_values_that_people_have_are_written(published):
    published.publisher(transform={"public.t": f"{HERE}:plain_values"})
    found = changed(published, "insert into t values (1)")
    assert [one.body for one in found] == [b'{"id":"00000000-0000-0000-0000-000000000007"}', b"abc"]


def test_a_table_keeps_its_transform_when_it_is_renamed(published):
    mapping = {"fields": {"number": "id"}, "route": "r", "type": "made"}
    published.publisher(transform={"public.t": mapping})
    found = changed(
        published, "insert into t values (1)", "alter table t rename to u", "insert into u values (2)"
    )
    assert [one.routing_key for one in found] == ["r.made"] * 2


def test_rules_of_more_tables_than_one_are_refused():
    for given in ({"transform": {"public.*": "a:b"}}, {"outbox": {"table": "public.*"}}):
        with pytest.raises(ConfigError, match="has a \\* where none may be"):
            parse_publisher("p", "events", {"target": "rabbitmq", **given})


# --- pgrepl events try ---


def tried(published: Published, capsysbinary: Any, *arguments: str) -> list[dict[str, Any]]:
    assert pgrepl(["events", "try", str(published.file), "--publisher", "events", *arguments]) == 0
    return [json.loads(line) for line in capsysbinary.readouterr().out.splitlines()]


def test_events_are_tried_from_recorded_changes(published, capsysbinary, monkeypatch):
    published.publisher(transform={"public.t": f"{HERE}:total_of"})
    execute(published.dsn, *(f"insert into t values ({n}, 'secret', {n})" for n in range(30)))
    published.receive()
    found = tried(published, capsysbinary)
    assert len(found) == 20
    assert found[0]["to"] == "sums.total"
    assert found[0]["body"] == {"total": "0.00"}
    lsn = found[7]["id"].split(":")[1]
    assert tried(published, capsysbinary, "--lsn", lsn) == [found[7]]
    assert tried(published, capsysbinary, "--lsn", "0/1") == []
    published.configure(
        publishers={"events": {"target": "nats", "database": "shop", "mask_columns": ["public.t.v"]}}
    )
    (sent,) = tried(published, capsysbinary, "--lsn", lsn)
    assert sent["to"] == "CREEK_wal_shop.public.t"
    assert (sent["body"]["op"], sent["body"]["after"]["v"]) == ("c", "***")
    monkeypatch.setenv(process.SALT_VARIABLE, SALT)
    to_kafka = {"target": "kafka", "format": "debezium", "database": "shop"}
    published.configure(publishers={"events": {**to_kafka, "hash_columns": ["public.t.id"]}})
    (sent,) = tried(published, capsysbinary, "--lsn", lsn)
    assert sent["key"] == {"id": hashlib.sha256(f"{SALT}7".encode()).hexdigest()}
    assert sent["body"]["after"]["price"] == "Arw="


def test_events_try_reports_failing_transform_with_function_and_error(published, capsys):
    published.publisher(transform={"public.t": f"{HERE}:total_of"})
    execute(published.dsn, "insert into t values (1)")
    published.receive()
    code = pgrepl(["events", "try", str(published.file), "--publisher", "events"])
    assert code == process.WILL_NOT_HELP
    said = capsys.readouterr().err
    assert "in total_of" in said
    assert "the transform of public.t failed: TypeError" in said
