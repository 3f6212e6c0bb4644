"""A Kafka that dies, stalls or is away, and a publisher that is killed: every change arrives."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from demo.kafka import KafkaBroker
from tests.support.kafka import KafkaTopics, SmallBroker, kept_rows
from tests.support.loop_disk import Disk, disk
from tests.support.publishing import (
    IMPATIENT,
    changing,
    connected,
    finish,
    killed_amid_sending,
    published_more,
    publishing,
    suffer_each_fault,
    wait_for_failures,
)
from tests.support.received import Received
from tests.support.replicated import execute, wait_until
from tests.support.toxiproxy import CUT, running_toxiproxy


@pytest.fixture
def received(dsn: str, tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    execute(dsn, "create table t(id int primary key, v int)", "create table other(id int primary key, v int)")
    received = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    received.begin()
    topic = f"{topics(received)}.{{schema}}.{{table}}"
    received.configure(publishers={"events": {"target": "kafka", "topic": topic}})
    KafkaTopics(kafka.servers, topics(received)).make("public.t", 3)
    return received


def topics(received: Received) -> str:
    """The prefix of its publisher's topics, at a broker of many tests."""
    return received.pipeline.name


def assert_all_arrived(received: Received, kafka: KafkaBroker) -> None:
    """Check that each change arrived, in order in its partition from generation to generation.

    A consumer that applies the messages by the rule has the source's rows.
    """
    messages = KafkaTopics(kafka.servers, topics(received)).messages()
    wanted = [change.id for batch in ChangeReader(received.pipeline).read() for change in batch]
    assert {message.id for message in messages if not message.is_left} == set(wanted)
    place = {id_: number for number, id_ in enumerate(wanted)}
    for _, sent in itertools.groupby(
        messages, lambda one: (one.topic, one.partition, one.headers["generation"])
    ):
        places = [place[message.id.removesuffix(":old")] for message in sent]
        assert places == sorted(set(places))
    kept = kept_rows(messages)
    for table in ("t", "other"):
        with connected(received.dsn) as cursor:
            cursor.execute(f"select id, v from {table}")
            rows = {f'{{"id":{key}}}': {"id": key, "v": value} for key, value in cursor.fetchall()}
        assert kept[f"public.{table}"] == rows


@pytest.mark.real_kill
def test_every_change_arrives_when_publisher_is_killed_again_and_again(received, kafka):
    chance = random.Random(4)
    with changing(received) as changes:
        for _ in range(6):
            killed_amid_sending(received, changes, chance)
    finish(received)
    assert_all_arrived(received, kafka)


@pytest.mark.real_kill
def test_every_change_arrives_when_broker_is_killed_and_away_for_a_while(received, kafka):
    """Back at once, and away for longer than a message may take."""
    with changing(received), publishing(received, IMPATIENT):
        for failures in (0, 1):
            published_more(received, 50)
            kafka.kill()
            wait_for_failures(received, failures)
            kafka.start()
        published_more(received, 50)
    finish(received)
    assert "sent again" in received.log_tail() or "tried again" in received.log.read_text()
    assert_all_arrived(received, kafka)


def test_every_change_arrives_when_broker_is_stopped_and_started(received, kafka):
    with changing(received), publishing(received):
        published_more(received, 50)
        kafka.stop()
        kafka.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, kafka)


def test_second_publisher_is_refused(received, kafka):
    with changing(received), publishing(received):
        published_more(received, 20)
        assert received.run("publish", "--publisher", "events") == process.RETRY_MAY_HELP
    finish(received)
    assert_all_arrived(received, kafka)


def test_publisher_waits_for_broker_that_is_not_there(received, kafka, monkeypatch):
    kafka.stop()
    execute(received.dsn, "insert into t values (1, 1)")
    received.receive()
    with publishing(received):
        wait_until(lambda: "tried again in" in received.log_tail(), what="the publisher to notice")
        kafka.start()
        published_more(received, 1)


def test_every_change_arrives_under_faults_of_network(received, monkeypatch, tmp_path):
    broker = SmallBroker(tmp_path / "kafka")
    with running_toxiproxy() as proxy, ExitStack() as ended:
        ended.callback(broker.stop)
        link = proxy.link("kafka", broker.port)
        # Clients of Kafka go where the cluster tells them.
        broker.advertised = f"127.0.0.1:{link.port}"
        broker.start()
        monkeypatch.setenv(TARGET_VARIABLE, f"kafka://{broker.advertised}")
        with changing(received) as changes, publishing(received, IMPATIENT):
            published_more(received, 50)
            # Kafka's client connects again by itself, and has ten seconds for it.
            suffer_each_fault(received, link, changes, noticed=("timeout", CUT))
        finish(received)
        assert_all_arrived(received, broker)


@pytest.fixture
def on_small_disk(tmp_path: Path) -> Iterator[tuple[KafkaBroker, Disk]]:
    with disk(tmp_path) as small:
        broker = SmallBroker(small.folder)
        broker.start()
        try:
            yield broker, small
        finally:
            broker.stop()


@pytest.mark.real_kill
def test_full_disk_holds_publisher_until_there_is_room_again(received, on_small_disk, monkeypatch):
    """A broker whose disk is full ends; an operator frees space and starts it again."""
    broker, small = on_small_disk
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    KafkaTopics(broker.servers, topics(received)).make("public.t", 3)
    with changing(received), publishing(received, IMPATIENT):
        published_more(received, 50)
        small.fill()
        wait_until(lambda: "tried again in" in received.log_tail(), what="the publisher to notice")
        broker.kill()
        small.free()
        broker.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, broker)
