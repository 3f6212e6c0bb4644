"""Changes in Avro at a real Kafka, under schemas of a real registry, read back by Confluent's client."""

from __future__ import annotations

import json
import threading
import time
from datetime import UTC, datetime
from decimal import Decimal
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from airflow_provider_pgrepl.__main__ import main as pgrepl
from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.events.formats.avro import ChangeSchema
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.events.targets.kafka import (
    RefusedSchemaError,
    SchemaRegistry,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName
from demo.kafka import KafkaBroker
from tests.support.kafka import KafkaTopics, RawMessage
from tests.support.publishing import run_publisher
from tests.support.received import Received
from tests.support.registry import Registry, running_registry
from tests.support.replicated import execute, wait_until

COLUMNS = (
    "id int primary key, v text, price numeric(10,2), at timestamptz, doc jsonb, tags text[], day date,"
    ' flag boolean, "odd name" uuid'
)


class Avro(Received):
    """A pipeline with one publisher of Avro."""

    topics: KafkaTopics
    registry: SchemaRegistryClient

    def publisher(self, **settings: Any) -> None:
        self.configure(publishers={"events": {"target": "kafka", "format": "avro", **settings}})

    def changed(self, *statements: str, code: int = process.DONE) -> list[RawMessage]:
        """Run statements, receive and publish them, and return the messages that the topics then hold."""
        execute(self.dsn, *statements)
        self.receive()
        assert run_publisher(self) == code, self.log_tail()
        return self.topics.raw()

    def read(self, found: list[RawMessage]) -> list[dict[str, Any]]:
        """Return the values that are not tombstones, as Confluent's deserializer reads them."""
        deserializer = AvroDeserializer(self.registry)
        of_value = (SerializationContext(one.topic, MessageField.VALUE) for one in found)
        return [
            deserializer(one.value, context)
            for one, context in zip(found, of_value, strict=True)
            if one.value is not None
        ]


@pytest.fixture
def avro(
    dsn: str, tmp_path: Path, kafka: KafkaBroker, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> Avro:
    monkeypatch.setenv(process.TARGET_VARIABLE, kafka.uri)
    monkeypatch.setenv(process.REGISTRY_VARIABLE, registry.uri)
    execute(dsn, f"create table t({COLUMNS})", "create table other(id int primary key, n int)")
    pipeline = Avro(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    pipeline.begin()
    pipeline.publisher()
    pipeline.topics = KafkaTopics(kafka.servers, pipeline.pipeline.name)
    pipeline.registry = SchemaRegistryClient({"url": registry.uri})
    return pipeline


def test_every_operation_is_read_as_the_reader_of_changes_has_it(avro):
    found = avro.changed(
        "insert into t values (1, 'ä', 1.50, '2024-05-06 07:08:09.123456+02', '{\"a\": 1}', '{x,y}',"
        " '2024-02-29', true, '46145d05-8bc7-403b-8098-1baf99e97b56')",
        "insert into t(id) values (2)",
        "update t set v = 'b' where id = 1",
        "delete from t where id = 2",
        "truncate t",
    )
    made = avro.read(found)
    changes = [change for batch in ChangeReader(avro.pipeline).read() for change in batch]
    by_columns = ("id", "table", "op", "xid")
    assert [[one[name] for name in by_columns] for one in made] == [
        [getattr(change, name) for name in by_columns] for change in changes
    ]
    assert [one["commit_lsn"] for one in made] == [str(change.commit_lsn) for change in changes]
    assert [one["commit_ts"] for one in made] == [change.commit_ts for change in changes]
    assert made[0]["data"] == {
        "id": 1,
        "v": "ä",
        "price": Decimal("1.50"),
        "at": datetime(2024, 5, 6, 5, 8, 9, 123456, tzinfo=UTC),
        "doc": b'{"a": 1}',
        "tags": ["x", "y"],
        "day": datetime(2024, 2, 29, tzinfo=UTC).date(),
        "flag": True,
        "odd_name": made[0]["data"]["odd_name"],
    }
    assert str(made[0]["data"]["odd_name"]) == "46145d05-8bc7-403b-8098-1baf99e97b56"
    assert set(made[1]["data"].values()) == {2, None}
    assert (made[3]["data"], made[3]["old"]) == (None, {"id": 2})
    assert (made[4]["op"], made[4]["data"], made[4]["old"]) == ("truncate", None, None)
    assert [one.key for one in found][:2] == [b'{"id":1}', b'{"id":2}']


def test_a_change_of_the_key_is_a_delete_and_an_insert(avro):
    avro.publisher(tombstones=True)
    found = avro.changed("insert into other values (1, 5)", "update other set id = 2")
    assert [one.key for one in found] == [b'{"id":1}', b'{"id":1}', b'{"id":1}', b'{"id":2}']
    assert found[2].value is None
    _, gone, came = avro.read(found)
    assert (gone["op"], gone["data"], gone["old"]) == ("delete", None, {"id": 1})
    assert (came["op"], came["data"], came["old"]) == ("insert", {"id": 2, "n": 5}, None)


@pytest.mark.parametrize(("unchanged", "named"), [("mark", ["v"]), ("fill", [])])
def test_values_that_were_not_sent_are_named_or_filled_in(avro, unchanged, named):
    avro.publisher(unchanged=unchanged)
    execute(avro.dsn, "alter table t alter v set storage external")
    found = avro.changed(
        "insert into t(id, v) values (1, repeat('x', 5000))", "update t set flag = true where id = 1"
    )
    last = avro.read(found)[-1]
    assert (last["unchanged"], last["data"]["flag"]) == (named, True)
    assert last["data"]["v"] == (None if named else "x" * 5000)


def test_a_column_that_comes_or_goes_is_another_version_that_reads_both(avro):
    found = avro.changed(
        "insert into other values (1, 1)",
        "alter table other add note text",
        "insert into other values (2, 2, 'n')",
        "alter table other drop n",
        "insert into other values (3, 'm')",
    )
    assert [one["data"] for one in avro.read(found)] == [
        {"id": 1, "n": 1},
        {"id": 2, "n": 2, "note": "n"},
        {"id": 3, "note": "m"},
    ]
    subject = f"{avro.pipeline.name}.public.other-value"
    assert avro.registry.get_versions(subject) == [1, 2, 3]
    newest = AvroDeserializer(avro.registry, avro.registry.get_latest_version(subject).schema.schema_str)
    context = SerializationContext("other", MessageField.VALUE)
    assert [newest(one.value, context)["data"] for one in found] == [
        {"id": 1, "note": None},
        {"id": 2, "note": "n"},
        {"id": 3, "note": "m"},
    ]


def test_a_version_that_the_registry_refuses_stops_its_table_alone(avro, registry):
    found = avro.changed(
        "insert into other values (1, 1)",
        "alter table other alter n type boolean using n > 0",
        "insert into other values (2, true)",
        "insert into t(id) values (1)",
        code=process.WILL_NOT_HELP,
    )
    assert [(one["table"], one["data"]["id"]) for one in avro.read(found)] == [
        ("public.other", 1),
        ("public.t", 1),
    ]
    assert " refuses the schema: " in avro.log_tail()
    registry.keep_compatible("NONE")
    try:
        found = avro.read(avro.changed())
    finally:
        registry.keep_compatible()
    assert [one["data"] for one in found[:2]] == [{"id": 1, "n": 1}, {"id": 2, "n": True}]


@pytest.mark.parametrize(
    ("names", "subject"),
    [("record", "{p}.public.other.Change"), ("topic_record", "{p}.public.other-{p}.public.other.Change")],
)
def test_subjects_are_called_by_confluents_strategies(avro, names, subject):
    avro.publisher(subject_names=names)
    assert len(avro.changed("insert into other values (1, 1)")) == 1
    assert subject.format(p=avro.pipeline.name) in avro.registry.get_subjects()


def test_a_registry_that_is_away_is_waited_for(avro, monkeypatch):
    with running_registry() as another:
        another.stop()
        monkeypatch.setenv(process.REGISTRY_VARIABLE, another.uri)
        execute(avro.dsn, "insert into other values (1, 1)")
        avro.receive()
        running = avro.start("publish", "--publisher", "events", "--until", "caught-up")
        wait_until(lambda: " does not answer: " in avro.log_tail(), 150, "it to notice")
        assert running.poll() is None
        another.start()
        assert running.wait(120) == 0, avro.log_tail()
    assert len(avro.topics.raw()) == 1


def test_it_can_be_tried_without_either(avro, capsys, monkeypatch):
    monkeypatch.delenv(process.REGISTRY_VARIABLE)
    execute(avro.dsn, "insert into other values (1, 1)")
    avro.receive()
    assert pgrepl(["events", "try", str(avro.file), "--publisher", "events"]) == process.DONE
    assert json.loads(capsys.readouterr().out)["body"]["data"] == {"id": 1, "n": 1}
    assert run_publisher(avro) == process.WILL_NOT_HELP
    assert "PGREPL_REGISTRY_URI is not set" in avro.log_tail()


@pytest.mark.parametrize(
    ("status", "error", "says"),
    [
        (401, TargetError, "login was refused"),
        (422, RefusedSchemaError, "refuses the schema: no"),
        (503, TargetUnavailableError, "does not answer: no"),
    ],
)
def test_schema_registry_status_selects_error_class_without_exposing_password(status, error, says):
    class Answers(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            said = json.dumps({"error_code": status * 100, "message": "no"}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            asked = SchemaRegistry(f"http://u:secret@127.0.0.1:{server.server_port}", "topic")
            begun = time.monotonic()
            with pytest.raises(error, match=says) as caught:
                asked.prefix(ChangeSchema("s", TableName("public", "t"), {}), "t")
            assert time.monotonic() - begun < 30
        finally:
            server.shutdown()
            thread.join()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("uri", ["", "registry:8081", "ftp://host", "http://", "http://host:x"])
def test_a_uri_that_is_none_is_refused_without_being_shown(uri):
    with pytest.raises(TargetError, match="cannot be read"):
        SchemaRegistry(uri, "topic")
