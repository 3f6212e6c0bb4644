"""events/publishing: confirms after a refusal, a record of any size, generations, settings."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import ConfigError, FencedError, TargetUnavailableError
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherLog,
    PublisherRecord,
    StoppedTable,
    read_record,
)
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents, Refusal
from airflow_provider_pgrepl.replication.events.targets.rabbitmq import RabbitMQLink
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.support.examples import examples

BASE = {"name": "shop", "lake": "/lake", "tables": ["public.*"]}
SETTINGS = parse_publisher("shop", "events", {"target": "rabbitmq"})


def position(number: int) -> EventPosition:
    return EventPosition(Epoch(1), LSN(number), 0)


def event(number: int) -> Event:
    place = position(number)
    return Event(place, str(place), 1, "public.t", "insert", datetime(2026, 1, 1, tzinfo=UTC), b"{}")


class Channel:
    """An open channel on which messages are counted."""

    is_open = True

    def __init__(self) -> None:
        self.sent: list[str] = []

    def basic_publish(self, exchange: str, key: str, body: bytes, properties: Any, mandatory: bool) -> None:
        assert mandatory
        self.sent.append(properties.message_id)


class Connection:
    """A connection that is still closing after `close` returns."""

    is_open, is_closing = True, False

    def __init__(self) -> None:
        self.ioloop = self
        self.callbacks: list[Any] = []

    def add_callback_threadsafe(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def run(self) -> None:
        while self.callbacks:
            self.callbacks.pop(0)()

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def stop(self) -> None:
        """Do nothing: the test's loop ends by itself."""

    def close(self) -> None:
        self.is_open, self.is_closing = False, True


def link() -> RabbitMQLink:
    made = RabbitMQLink(pika.ConnectionParameters(), SETTINGS, {}, set())
    made._channel, made._connection = Channel(), Connection()
    return made


def confirm(made: RabbitMQLink, kind: Any, tag: int, multiple: bool = False) -> None:
    made._confirmed(pika.frame.Method(1, kind(tag, multiple)))


def test_rabbitmq_ack_after_nack_settles_no_event():
    """RabbitMQ confirms several at once, the refused among them, before it reads that the connection ends."""
    made, sending = link(), PendingEvents([event(number) for number in range(1, 5)])
    made.send(sending)
    made._connection.run()
    confirm(made, pika.spec.Basic.Ack, 1)
    confirm(made, pika.spec.Basic.Nack, 2)
    confirm(made, pika.spec.Basic.Ack, 4, multiple=True)
    assert not sending.wait(0)
    made._end(None)
    assert isinstance(sending.error, TargetUnavailableError)
    assert sending.settled == 1


def test_sending_on_ended_link_fails_with_target_unavailable():
    made, sending = link(), PendingEvents([event(1)])
    made._end(OSError("gone"))
    made.send(sending)
    assert isinstance(sending.error, TargetUnavailableError)
    assert not made.is_open


@examples(100)
@given(st.permutations(range(8)), st.integers(0, 8), st.sets(st.integers(0, 7)))
def test_all_before_the_first_unsettled_event_is_settled(order: list[int], count: int, refused: set[int]):
    events = [event(number) for number in range(8)]
    sending = PendingEvents(events)
    for index in order[:count]:
        sending.settle(index, Refusal(events[index], "no") if index in refused else None)
    unsettled = set(order[count:])
    assert sending.settled == min(unsettled, default=8)
    assert sending.wait(0) == (count == 8)
    assert [one.event for one in sending.refusals] == [
        one for index, one in enumerate(events) if index in refused and index < sending.settled
    ]


def test_a_record_holds_any_number_of_stopped_tables(tmp_path: Path):
    stopped = {
        oid: StoppedTable(
            f"public.t{oid}", (f"public.t{oid}",), position(oid), "TargetError", "é" * 99, "hint"
        )
        for oid in range(1, 1001)
    }
    record = PublisherRecord(
        position(2000), 7, 6, 8, 9, "me", "kafka: the topics t", datetime(2026, 1, 1, tzinfo=UTC), stopped
    )
    record = replace(record, columns={16_400: frozenset({1, 2, 3, 5, 8, 9}), 16_500: frozenset()})
    publisher_log = PublisherLog(str(tmp_path), "events")
    publisher_log.take(record, "me")
    publisher_log.save(record)
    assert read_record(str(tmp_path), "events") == record
    assert record.needed_after == position(1)


def test_only_a_record_with_columns_has_a_layout_that_earlier_versions_refuse():
    record = PublisherRecord(position(1))
    for columns, layout in ((None, 1), ({}, 2), ({16_400: frozenset({1})}, 2)):
        text = replace(record, columns=columns).to_json()
        fields = json.loads(text)
        assert (fields["layout"], "columns" in fields) == (layout, layout == 2)
        assert PublisherRecord.from_json(text).columns == columns


def test_replaced_publisher_cannot_save_progress_or_skipped_events(tmp_path: Path):
    first, second = (PublisherLog(str(tmp_path), "events") for _ in range(2))
    record = first.take(PublisherRecord(position(1)), "first")
    second.take(PublisherRecord(position(1)), "second")
    with pytest.raises(FencedError):
        first.save(record)
    with pytest.raises(FencedError):
        first.add_skipped([{"id": "1", "table": "t", "reason": "", "skipped_at": None}])
    second.save(record)


@pytest.mark.parametrize(
    ("publishers", "says"),
    [
        ({"a": {}}, "publishers.a.target: is missing"),
        ({"a": 1}, "publishers.a: 1 must be an object"),
        ({"A": {"target": "rabbitmq"}}, "may hold only a-z"),
        ({"a": {"target": "pulsar"}}, "publishers.a.target: 'pulsar' must be one of 'rabbitmq'"),
        ({"a": {"target": "kafka", "topic": "a b"}}, "topic: 'a b' may hold A-Z"),
        ({"a": {"target": "kafka", "topic": "{name}"}}, "topic: '{name}' may hold A-Z"),
        (
            {"a": {"target": "kafka", "topic": "{table}", "tombstones": True}},
            "tombstones: several tables would share a topic",
        ),
        ({"a": {"target": "nats", "format": "json", "stream": "a.b"}}, "stream: may hold only"),
        ({"a": {"target": "nats", "format": "json", "wire": "v1"}}, "wire: is of creek's format"),
        ({"a": {"target": "nats", "database": "d", "stream": "s"}}, "stream: is not of creek's format"),
        ({"a": {"target": "rabbitmq", "format": "creek"}}, "format: 'creek' is not of target 'rabbitmq'"),
        (
            {name: {"target": "nats", "format": "json"} for name in "ab"},
            "a and b both send to the stream shop",
        ),
        ({"a": {"target": "nats", "topic": "x"}}, "topic: is of target 'kafka' alone"),
        (
            {name: {"target": "kafka"} for name in "ab"},
            "a and b both send to the topics shop.{schema}.{table}",
        ),
        ({"a": {"target": "rabbitmq", "queue": 1}}, "publishers.a.queue: unknown key"),
        ({"a": {"target": "rabbitmq", "tables": []}}, "tables: none is named"),
        ({"a": {"target": "rabbitmq", "tables": ["t"]}}, "publishers.a.tables[0]: 't' is not"),
        ({"a": {"target": "rabbitmq", "max_event_bytes": 0}}, "max_event_bytes: 0 must be greater than 0"),
        (
            {"a": {"target": "rabbitmq", "publish_retention_h": -1.0}},
            "publish_retention_h: -1.0 must be greater",
        ),
        ({"a": {"target": "rabbitmq", "metrics": "9187"}}, "'9187' is no address"),
        ({"a": {"target": "rabbitmq", "exchange": "amq.topic"}}, "the broker's own"),
        ({"a": {"target": "rabbitmq", "exchange": "x" * 256}}, "longer than the 255 bytes"),
        ({name: {"target": "rabbitmq"} for name in "ab"}, "a and b both send to exchange pgrepl.shop"),
        ({"a": {"target": "nats"}}, "publishers.a.database: is missing"),
        ({"a": {"target": "nats", "database": "a.b"}}, "database: may hold only"),
        ({"a": {"target": "nats", "database": "d", "namespace": ""}}, "namespace: may hold only"),
        ({"a": {"target": "nats", "database": "d", "exchange": "e"}}, "exchange: is of target 'rabbitmq'"),
        ({"a": {"target": "rabbitmq", "database": "d"}}, "publishers.a.database: is of format debezium"),
        (
            {
                "a": {
                    "target": "rabbitmq",
                    "tables": ["s.*", "public.t"],
                    "outbox": {"table": "public.outbox"},
                }
            },
            "public.outbox, which outbox or transform names, is none of tables",
        ),
        ({"a": {"target": "rabbitmq", "messages": ["orders"]}}, "the pipeline does not keep those of orders"),
        (
            {name: {"target": "nats", "database": "d"} for name in "ab"},
            "a and b both send to the streams CREEK_*_d",
        ),
    ],
)
def test_settings_that_cannot_be_used_are_named(publishers: Any, says: str):
    with pytest.raises(ConfigError) as caught:
        Pipeline.from_dict({**BASE, "message_prefixes": ["audit"], "publishers": publishers})
    assert says in str(caught.value)
