"""JSON, Debezium's format and business events at JetStream, into one stream of the publisher's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.app.publish import main
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import PublisherRecord, read_record
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from demo.nats import NatsServer
from tests.support.jetstream import CreekStream
from tests.support.publishing import publishing_in_thread
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

OUTBOX = "create table outbox(id uuid primary key default gen_random_uuid(), aggregatetype text,"
OUTBOX += " aggregateid text, type text, payload jsonb, tenant text)"


class Published(Received):
    """A pipeline with one publisher to a stream, whose app is run in the test's process."""

    uri: str

    def publisher(self, **settings: Any) -> None:
        self.configure(publishers={"events": {"target": "nats", "format": "json", **settings}})

    def publish(self, *arguments: str, code: int = process.DONE) -> list[Any]:
        """Run the publisher, and return the messages that it adds to the stream."""
        before = len(self.messages())
        given = ["--pipeline", str(self.file), "--publisher", "events", "--until", "caught-up", *arguments]
        assert main(given) == code
        return self.messages()[before:]

    def changed(self, *statements: str, code: int = process.DONE) -> list[Any]:
        execute(self.dsn, *statements)
        self.receive()
        return self.publish(code=code)

    def messages(self) -> list[Any]:
        return self.server.raw(self.pipeline.name)

    @property
    def server(self) -> CreekStream:
        return CreekStream(self.uri, "none")

    @property
    def record(self) -> PublisherRecord:
        record = read_record(self.pipeline.lake_root, "events")
        assert record is not None
        return record


@pytest.fixture
def published(dsn: str, tmp_path: Path, jetstream: NatsServer, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    execute(
        dsn,
        "create table t(id int primary key, v text, price numeric(10,2), at timestamptz)",
        'create schema "S.1"; create table "S.1"."a b"(id int primary key)',
        OUTBOX,
    )
    tables = ("public.t", '"S.1"."a b"', "public.outbox")
    pipeline = Published(dsn, tmp_path, tables, flush_interval_s=0.05, message_prefixes=("orders",))
    pipeline.uri = jetstream.uri
    pipeline.begin()
    pipeline.publisher()
    return pipeline


def body(message: Any) -> Any:
    return json.loads(message.data)


def test_every_change_arrives_in_order_as_the_reader_has_it(published):
    found = published.changed(
        "insert into t select g, 'v' || g, g, now() from generate_series(1, 50) g",
        "update t set v = null where id < 4",
        "update t set id = 100 where id = 9",
        'begin; delete from t where id = 5; insert into "S.1"."a b" values (1); commit',
        "truncate t",
    )
    expected = [change for batch in ChangeReader(published.pipeline).read() for change in batch]
    assert [body(one) for one in found] == [json.loads(to_json(change)) for change in expected]
    assert [one.headers["Pgrepl-Id"] for one in found] == [change.id for change in expected]
    stream = published.pipeline.name
    assert {one.subject for one in found} == {
        *(f"{stream}.public.t.{op}" for op in ("insert", "update", "delete", "truncate")),
        f"{stream}.S%2E1.a%20b.insert",
    }
    first = found[0].headers
    assert first["Nats-Msg-Id"] == f"{expected[0].id}-{first['Pgrepl-Generation']}"
    assert (first["Pgrepl-Op"], first["Content-Type"]) == ("insert", "application/json")


def test_republished_json_event_is_stored_again_with_higher_generation(published):
    first = published.changed("insert into t values (1)", "insert into t values (2)")
    again = published.publish("--after", first[0].headers["Pgrepl-Id"])
    assert [body(one) for one in again] == [body(first[1])]
    assert int(again[0].headers["Pgrepl-Generation"]) > int(first[0].headers["Pgrepl-Generation"])
    assert published.publish() == []


def test_an_outbox_and_messages_have_subjects_and_headers_of_their_own(published):
    published.publisher(
        tables=["public.outbox", "public.t"],
        outbox={"table": "public.outbox", "headers": {"tenant": "tenant"}},
        messages=["orders"],
        cloudevents=True,
    )
    found = published.changed(
        "begin; insert into t values (1);"
        "insert into outbox(aggregatetype, aggregateid, type, payload, tenant)"
        """ values ('order.eu', '17', 'paid *', '{"id": 17}', 'nörd');"""
        "select pg_logical_emit_message(true, 'orders', '{}'); delete from outbox; commit",
    )
    stream = published.pipeline.name
    assert [one.subject for one in found] == [
        f"{stream}.public.t.insert",
        f"{stream}.order.eu.paid%20%2A",
        f"{stream}.orders",
    ]
    assert [one.data for one in found[1:]] == [b'{"id": 17}', b"{}"]
    assert [EventPosition.parse(one.headers["Pgrepl-Id"]) for one in found] == sorted(
        EventPosition.parse(one.headers["Pgrepl-Id"]) for one in found
    )
    paid = found[1].headers
    assert (paid["tenant"], paid["Pgrepl-Type"]) == ("nörd", "paid *")
    assert (paid["ce-type"], paid["ce-specversion"]) == ("paid%20*", "1.0")
    assert (paid["ce-id"], paid["ce-subject"]) == (paid["event_id"], "public.outbox")
    assert found[0].headers["ce-datacontenttype"] == "application/json"
    assert found[0].headers["ce-source"] == f"/{published.pipeline.name}"


@pytest.mark.thorough(
    "JSON in test_every_change_arrives_in_order_as_the_reader_has_it; unit/test_debezium_events"
)
def test_debeziums_format_is_put_there_too(published):
    published.publisher(format="debezium", database="shop")
    (one,) = published.changed("insert into t values (1, 'v')")
    assert body(one)["op"] == "c"
    assert body(one)["after"]["v"] == "v"
    assert body(one)["source"]["db"] == "shop"


WRONG = {
    "'order', 'x', 'paid', '{}', E'two\\nlines'": "the event's header tenant has a line break",
    "'order', 'x', 'paid', '{}', ' a'": "ends with white space",
    "repeat('r', 2000), 'x', 'paid', '{}', ''": "the event's subject has more than 1,024 bytes",
    "'order', 'x', 'paid', to_json(repeat('p', 200000)), ''": "more than the server's max_payload",
    "'order', 'x', 'paid', '{}', repeat('h', 200000)": "more than the server's max_payload",
    "'.', 'x', '.', '{}', ''": "the event has no route",
}
"""Values of an outbox's row, and why its event cannot be sent."""


def test_an_event_that_nats_would_change_or_end_the_connection_for_stops_its_table(published):
    published.publisher(outbox={"table": "public.outbox", "headers": {"tenant": "tenant"}})
    columns = "aggregatetype, aggregateid, type, payload, tenant"
    # Each run begins behind the row at which the one before has stopped.
    begin: tuple[str, ...] = ()
    for number, (values, says) in enumerate(WRONG.items()):
        execute(
            published.dsn,
            f"insert into outbox({columns}) values ({values})",
            f"insert into t values ({number})",
        )
        published.receive()
        found = published.publish(*begin, code=process.WILL_NOT_HELP)
        assert [one.subject for one in found] == [f"{published.pipeline.name}.public.t.insert"], values
        (stopped,) = published.record.stopped.values()
        assert stopped.table == "public.outbox", values
        assert says in stopped.reason
        begin = ("--after", str(published.record.position))


def test_a_stream_that_is_there_is_used_with_the_limits_that_it_has(published, dsn):
    stream = published.pipeline.name
    published.server.make(stream, subjects=[f"{stream}.public.>"], max_msgs_per_subject=1)
    execute(dsn, "insert into t values (1)", "insert into t values (2)")
    published.receive()
    assert [body(one)["data"]["id"] for one in published.publish()] == [2]


def test_a_stream_without_the_subjects_is_told_by_name(published):
    stream = published.pipeline.name
    published.server.make(stream, subjects=[f"{stream}.public.other.>"])
    execute(published.dsn, "insert into t values (1)")
    published.receive()
    with publishing_in_thread(published):
        said = f"stream {stream} does not take {stream}.public.t.insert"
        wait_until(lambda: said in published.log_tail(), 150, "it to be told")
