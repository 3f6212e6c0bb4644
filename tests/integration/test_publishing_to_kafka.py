"""Every committed change arrives at Kafka, by its row's key, once and in order, or its table stops."""

from __future__ import annotations

import gc
import json
import random
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._acl import AclBinding, AclOperation, AclPermissionType
from confluent_kafka.admin._resource import ResourcePatternType, ResourceType

from airflow_provider_pgrepl.errors import TargetError, TargetUnavailableError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.app.publish import main
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.formats.json_text import to_json
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.publisher import Delivery
from airflow_provider_pgrepl.replication.events.publish.record import (
    PublisherProgress,
    PublisherRecord,
    read_record,
)
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.events.targets.base import Refusal, topic_of
from airflow_provider_pgrepl.replication.events.targets.kafka import Kafka
from airflow_provider_pgrepl.replication.events.targets.kafka_broker import properties_of
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from demo.kafka import KafkaBroker
from demo.postgres import free_port
from tests.conftest import closing_connection
from tests.support.kafka import KafkaMessage, KafkaTopics, kept_rows, running_kafka
from tests.support.received import Received
from tests.support.replicated import execute, wait_until


class Published(Received):
    """A pipeline with one publisher to Kafka, whose app is run in the test's process."""

    topics: KafkaTopics

    def run_publisher(self, *arguments: str) -> int:
        return main(
            ["--pipeline", str(self.file), "--publisher", "events", "--until", "caught-up", *arguments]
        )

    def publish(self, *arguments: str, code: int = process.DONE) -> list[KafkaMessage]:
        """All that the topics hold after a run."""
        assert self.run_publisher(*arguments) == code
        return self.topics.messages()

    def changed(self, *statements: str, code: int = process.DONE) -> list[KafkaMessage]:
        """Run statements, receive and publish them, and return the messages of the topics."""
        execute(self.dsn, *statements)
        self.receive()
        return self.publish(code=code)

    def publisher(self, **settings: Any) -> None:
        self.configure(publishers={"events": {"target": "kafka", **settings}})

    @property
    def record(self) -> PublisherRecord:
        record = read_record(self.pipeline.lake_root, "events")
        assert record is not None
        return record

    def rows(self, table: str) -> dict[str, Any]:
        """Return the source's rows by the keys of their events."""
        with closing_connection(self.dsn) as connection, connection.cursor() as cursor:
            cursor.execute(f"select id, v from {table}")
            return {f'{{"id":{key}}}': {"id": key, "v": value} for key, value in cursor.fetchall()}


TABLES = ("public.t", "public.other", "public.heap", '"S.1"."ä b"')


@pytest.fixture
def published(dsn: str, tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Published:
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    execute(
        dsn,
        "create table t(id int primary key, v text)",
        "create table other(id int primary key, v text)",
        "alter table other replica identity full",
        "create table heap(v text)",
        "alter table heap replica identity full",
        'create schema "S.1"; create table "S.1"."ä b"(id int primary key)',
    )
    pipeline = Published(dsn, tmp_path, TABLES, flush_interval_s=0.05)
    pipeline.begin()
    pipeline.publisher()
    pipeline.topics = KafkaTopics(kafka.servers, pipeline.pipeline.name)
    return pipeline


def test_every_change_arrives_in_the_order_of_its_table_as_the_reader_has_it(published):
    found = published.changed(
        "insert into t select g, 'v' || g from generate_series(1, 30) g",
        "update t set v = null where id < 4",
        "delete from t where id > 20",
        "truncate t",
        'insert into "S.1"."ä b" values (1)',
    )
    expected = [change for batch in ChangeReader(published.pipeline).read() for change in batch]
    name = published.pipeline.name
    by_topic = {message.topic for message in found}
    assert by_topic == {f"{name}.public.t", f"{name}.S.1.__b"}
    for topic in by_topic:
        sent = [message for message in found if message.topic == topic]
        wanted = [
            change for change in expected if topic_of(f"{name}.{{schema}}.{{table}}", change.table) == topic
        ]
        assert [message.value for message in sent] == [json.loads(to_json(change)) for change in wanted]
        assert [message.headers["id"] for message in sent] == [change.id for change in wanted]
        assert [message.headers["op"] for message in sent] == [change.op for change in wanted]
        assert sent[0].timestamp == int(wanted[0].commit_ts.timestamp() * 1_000)
    assert [message.key for message in found if message.topic.endswith(".t")][:2] == ['{"id":1}', '{"id":2}']
    assert len({message.headers["generation"] for message in found}) == 1


def test_the_next_run_goes_on_where_the_last_one_ended(published):
    first = published.changed("insert into t values (1)")
    assert published.publish() == first
    assert [one.value["data"]["id"] for one in published.changed("insert into t values (2)")] == [1, 2]
    assert published.record.published == 2


def test_a_key_that_changes_is_a_delete_and_an_insert(published):
    sent = published.changed(
        "insert into t values (1, 'a')",
        "update t set id = 2, v = 'b'",
        "insert into other values (1, 'a')",
        "update other set v = 'b'",
        "update other set id = 2",
    )
    of_t = [one for one in sent if one.topic.endswith(".t")]
    assert [(one.value["op"], one.key) for one in of_t] == [
        ("insert", '{"id":1}'),
        ("delete", '{"id":1}'),
        ("insert", '{"id":2}'),
    ]
    assert of_t[1].value["old"] == {"id": 1}
    assert of_t[2].value["old"] is None
    assert of_t[1].id == f"{of_t[2].id}:old"
    of_other = [one for one in sent if one.topic.endswith(".other")]
    assert [(one.value["op"], one.key) for one in of_other] == [
        ("insert", '{"id":1}'),
        ("update", '{"id":1}'),
        ("delete", '{"id":1}'),
        ("insert", '{"id":2}'),
    ]
    assert of_other[1].value["old"] == {"id": 1, "v": "a"}


def test_applying_each_kafka_partition_reproduces_source_tables(published):
    for table in ("public.t", "public.other"):
        published.topics.make(table, 5)
    chance = random.Random(3)
    for _ in range(4):
        statements = []
        for _ in range(60):
            table, key = chance.choice(("t", "other")), chance.randint(1, 20)
            statements.append(
                chance.choice(
                    [
                        f"insert into {table} values ({key}, 'v{chance.random()}') on conflict do nothing",
                        f"update {table} set v = 'u{chance.random()}' where id = {key}",
                        f"update {table} set id = id + 20 where id = {key}"
                        f" and not exists (select from {table} where id = {key + 20})",
                        f"delete from {table} where id = {key}",
                        f"truncate {table}" if chance.random() < 0.2 else "select",
                    ]
                )
            )
        kept = kept_rows(published.changed(*statements))
        for table in ("t", "other"):
            assert kept.get(f"public.{table}", {}) == published.rows(table)


def test_rows_without_key_have_their_tables(published):
    published.topics.make("public.heap", 3)
    sent = published.changed(
        "insert into heap select g from generate_series(1, 20) g",
        "update heap set v = 'x'",
        "delete from heap",
    )
    assert {one.key for one in sent} == {'{"table":"public.heap"}'}
    assert len({one.partition for one in sent}) == 1
    assert [one.value["op"] for one in sent] == ["insert"] * 20 + ["update"] * 20 + ["delete"] * 20


def test_a_truncate_reaches_every_partition(published):
    published.topics.make("public.t", 3)
    sent = published.changed("insert into t values (1)", "truncate t")
    assert [one.partition for one in sent if one.value["op"] == "truncate"] == [0, 1, 2]
    assert published.record.published == 2


def test_tombstones_follow_what_has_gone(published):
    published.publisher(tombstones=True)
    sent = published.changed(
        "insert into t values (1)",
        "update t set id = 2",
        "delete from t",
        "insert into heap values ('a')",
        "delete from heap",
    )
    assert [(one.key, one.value and one.value["op"]) for one in sent if one.topic.endswith(".t")] == [
        ('{"id":1}', "insert"),
        ('{"id":1}', "delete"),
        ('{"id":1}', None),
        ('{"id":2}', "insert"),
        ('{"id":2}', "delete"),
        ('{"id":2}', None),
    ]
    # Of the table's key there is always something left.
    assert [one.value["op"] for one in sent if one.topic.endswith(".heap")] == ["insert", "delete"]


def test_an_event_that_is_too_large_stops_its_table_alone(published):
    published.topics.make("public.t", 1, **{"max.message.bytes": "20000"})
    sent = published.changed(
        "insert into t select g, repeat('x', 1000) from generate_series(1, 100) g",
        "insert into t values (200, repeat('y', 30000))",
        "insert into t values (201)",
        "insert into other values (1)",
        code=process.WILL_NOT_HELP,
    )
    # Batches of small ones are larger than the topic takes; each of them is not.
    assert [one.value["data"]["id"] for one in sent if one.topic.endswith(".t")][-1] in (100, 201)
    assert {one.value["data"]["id"] for one in sent if one.topic.endswith(".t")} >= set(range(1, 101))
    # Events that were sent concurrently come again, with the same id.
    assert {one.value["data"]["id"] for one in sent if one.topic.endswith(".other")} == {1}
    (stopped,) = published.record.stopped.values()
    assert "max.message.bytes" in stopped.reason
    published.publisher(on_error="skip_and_record")
    assert 201 in {one.value["data"]["id"] for one in published.publish() if one.topic.endswith(".t")}
    assert published.record.skipped == 1


def test_a_topic_that_may_not_be_written_stops_its_table_alone(published, kafka):
    name = f"{published.pipeline.name}.public.t"
    admin = AdminClient({"bootstrap.servers": kafka.servers})
    denied = AclBinding(
        ResourceType.TOPIC,
        name,
        ResourcePatternType.LITERAL,
        "User:ANONYMOUS",
        "*",
        AclOperation.WRITE,
        AclPermissionType.DENY,
    )
    admin.create_acls([denied])[denied].result()
    sent = published.changed(
        "insert into t values (1)", "insert into other values (1)", code=process.WILL_NOT_HELP
    )
    assert [one.value["table"] for one in sent] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert stopped.reason.endswith(f"topic {name}: the user may not write it")


def test_a_time_that_a_topic_does_not_take_stops_its_table_alone(published):
    published.topics.make("public.t", 1, **{"message.timestamp.before.max.ms": "1"})
    sent = published.changed(
        "insert into t values (1)", "insert into other values (1)", code=process.WILL_NOT_HELP
    )
    assert [one.value["table"] for one in sent] == ["public.other"]
    (stopped,) = published.record.stopped.values()
    assert "does not take the time of the commit" in stopped.reason


def test_no_two_tables_share_a_topic_by_their_signs(published):
    execute(published.dsn, 'create table "S.1"."ö_b"(id int primary key)')
    published.configure(tables=(*TABLES, '"S.1"."ö_b"'))
    sent = published.changed(
        'alter publication "' + published.pipeline.publication + '" add table "S.1"."ö_b"',
        'insert into "S.1"."ä b" values (1)',
        'insert into "S.1"."ö_b" values (1)',
        code=process.WILL_NOT_HELP,
    )
    assert [one.value["table"] for one in sent] == ['"S.1"."ä b"']
    (stopped,) = published.record.stopped.values()
    assert stopped.reason.endswith(
        '"S.1"."ä b" is published to it already, and rows of two tables with the same key would replace each'
        " other"
    )


def events_of(table: str, *sizes: int) -> list[Event]:
    at = datetime.now(UTC)
    places = [EventPosition(Epoch(1), LSN(1), number) for number in range(len(sizes))]
    return [
        Event(place, str(place), 1, table, "insert", at, b"x" * size, key=b"%d" % number)
        for number, (place, size) in enumerate(zip(places, sizes, strict=True))
    ]


def test_after_the_large_one_was_found_batches_are_sent_again(published, kafka):
    published.topics.make("public.t", 1, **{"max.message.bytes": "2000"})
    target = Kafka(kafka.uri, published.pipeline.publisher("events"))
    reconnects = PublisherProgress()
    delivery = Delivery(target, lambda _: False, reconnects, lambda: 1)
    delivery.connect()
    refused: list[Refusal] = []
    for _ in range(2):
        events = events_of("public.t", 100, 5_000, 100)
        delivery.send(events, lambda _, refusals: refused.extend(refusals))
        delivery.settle_down_to(0)
        delivery.send(events_of("public.t", 100), lambda *_: None)
        delivery.settle_down_to(0)
    delivery.close()
    assert [len(refusal.event.body) for refusal in refused] == [5_000] * 2
    # To one by one and back, each time.
    assert reconnects.reconnects == 4


def threads() -> int:
    """Return the number of threads of the process, including librdkafka's."""
    return len([*Path("/proc/self/task").iterdir()])


def test_attempts_without_a_broker_leave_no_threads(published):
    target = Kafka(f"kafka://127.0.0.1:{free_port()}", published.pipeline.publisher("events"))
    before = threads()
    gc.disable()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("airflow_provider_pgrepl.replication.events.targets.kafka._CONNECT_S", 0.1)
            for _ in range(4):
                with pytest.raises(TargetUnavailableError):
                    target.connect()
        wait_until(lambda: threads() <= before + 4, 150, "librdkafka's threads to end")
    finally:
        gc.enable()


def test_a_template_may_put_all_tables_into_one_topic(published):
    published.publisher(topic=f"{published.pipeline.name}.all")
    sent = published.changed("insert into t values (1)", "insert into other values (1)", "delete from t")
    assert [(one.value["table"], one.value["op"]) for one in sent] == [
        ("public.t", "insert"),
        ("public.other", "insert"),
        ("public.t", "delete"),
    ]


def test_rejected_kafka_login_exits_78_and_records_reason(published, monkeypatch, tmp_path):
    users = (
        "sasl.enabled.mechanisms=PLAIN\nsasl.mechanism.inter.broker.protocol=PLAIN\n"
        "listener.name.sasl_plaintext.plain.sasl.jaas.config="
        "org.apache.kafka.common.security.plain.PlainLoginModule required"
        ' username="broker" password="other" user_broker="other" user_me="geheim";'
    )
    with running_kafka(users, protocol="SASL_PLAINTEXT") as server:
        execute(published.dsn, "insert into t values (1)")
        published.receive()
        monkeypatch.setenv(TARGET_VARIABLE, f"kafka://me:wrong@{server.servers}")
        assert published.run_publisher() == process.WILL_NOT_HELP
        assert published.record.reason == f"Kafka at {server.servers}: the login of me was refused"
        monkeypatch.setenv(TARGET_VARIABLE, f"kafka://me:geheim@{server.servers}")
        assert published.run_publisher() == process.DONE


@pytest.mark.parametrize(
    ("uri", "found"),
    [
        ("kafka://a:9092,b:9093", {"bootstrap.servers": "a:9092,b:9093", "security.protocol": "plaintext"}),
        (
            "kafkas://me:s%40c:x@[::1]:9092/?sasl.mechanism=SCRAM-SHA-512&ssl.ca.location=/ca.pem",
            {
                "bootstrap.servers": "[::1]:9092",
                "security.protocol": "sasl_ssl",
                "sasl.username": "me",
                "sasl.password": "s@c:x",
                "sasl.mechanism": "SCRAM-SHA-512",
                "ssl.ca.location": "/ca.pem",
            },
        ),
    ],
)
def test_a_uri_is_read(uri, found):
    assert properties_of(uri) == found


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "amqp://a:1",
        "kafka://",
        "kafka://a:x",
        "kafka://a:9092/path",
        "kafka://u:geheim@a:9092?x",
        "kafka://a,,b",
    ],
)
def test_a_uri_that_is_none_is_refused_and_not_shown(uri):
    with pytest.raises(TargetError) as caught:
        properties_of(uri)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["acks", "plugin.library.paths", "enable.idempotence", "delivery.report.only.error", "error_cb"]
)
def test_kafka_uri_rejects_reserved_producer_properties(name):
    with pytest.raises(TargetError, match=f"sets {name}"):
        properties_of(f"kafka://a:9092?{name}=geheim")


@pytest.mark.parametrize(("name", "value"), [("non.sense", "1"), ("security.protocol", "geheim")])
def test_a_property_that_is_none_is_refused_and_its_value_not_shown(
    published, monkeypatch, kafka, caplog, name, value
):
    monkeypatch.setenv(TARGET_VARIABLE, f"{kafka.uri}?{name}={value}")
    execute(published.dsn, "insert into t values (1)")
    published.receive()
    assert published.run_publisher() == process.WILL_NOT_HELP
    assert f"property {name}: there is no such one" in caplog.text
    assert "geheim" not in caplog.text
