"""A Kafka that dies, stalls or is away, and a publisher that is killed: every change arrives."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.events.change_reader import ChangeReader
from demo.kafka import KafkaBroker
from tests.support.kafka import KafkaTopics, kept_rows, running_kafka
from tests.support.loop_disk import Disk, disk
from tests.support.publishing import (
    changing,
    connected,
    finish,
    killed_amid_sending,
    published_more,
    publishing,
)
from tests.support.received import Received
from tests.support.replicated import execute, wait_until
from tests.support.silent_proxy import SilentProxy


@pytest.fixture
def kafka() -> Iterator[KafkaBroker]:
    with running_kafka() as broker:
        yield broker


@pytest.fixture
def received(dsn: str, tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    execute(dsn, "create table t(id int primary key, v int)", "create table other(id int primary key, v int)")
    received = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "kafka", "topic": "db.{schema}.{table}"}})
    KafkaTopics(kafka.servers, "db").make("public.t", 3)
    return received


def assert_all_arrived(received: Received, kafka: KafkaBroker) -> None:
    """Each change, in its partition in order from generation to generation; who applies them by the rule has
    the source."""
    messages = KafkaTopics(kafka.servers, "db").messages()
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


def test_a_publisher_killed_again_and_again(received, kafka):
    chance = random.Random(4)
    with changing(received):
        for _ in range(6):
            killed_amid_sending(received, chance)
    finish(received)
    assert_all_arrived(received, kafka)


def test_a_broker_that_is_killed_and_is_away_for_a_while(received, kafka):
    with changing(received), publishing(received):
        for away_s in (0.0, 5.0, 70.0):
            published_more(received, 50)
            kafka.kill()
            time.sleep(away_s)
            kafka.start()
        published_more(received, 50)
    finish(received)
    assert "sent again" in received.log_tail() or "tried again" in received.log.read_text()
    assert_all_arrived(received, kafka)


def test_a_broker_that_is_stopped_and_comes_back(received, kafka):
    with changing(received), publishing(received):
        published_more(received, 50)
        kafka.stop()
        kafka.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, kafka)


def test_a_second_publisher_is_refused(received, kafka):
    with changing(received), publishing(received):
        published_more(received, 20)
        assert received.run("publish", "--publisher", "events") == process.RETRY_MAY_HELP
    finish(received)
    assert_all_arrived(received, kafka)


def test_no_broker_is_waited_for(received, kafka, monkeypatch):
    kafka.stop()
    execute(received.dsn, "insert into t values (1, 1)")
    received.receive()
    with publishing(received):
        wait_until(lambda: "tried again in" in received.log_tail(), 60, "the publisher to notice")
        kafka.start()
        published_more(received, 1)


@pytest.fixture
def behind_proxy() -> Iterator[tuple[KafkaBroker, SilentProxy]]:
    """A broker that names the proxy as its address: clients of Kafka go where the cluster tells them."""
    with running_kafka() as broker:
        broker.stop()
        with closing(SilentProxy(broker.port)) as proxy:
            broker.advertised = f"127.0.0.1:{proxy.port}"
            broker.start()
            yield broker, proxy


def test_a_connection_that_stalls_and_is_cut(received, behind_proxy, monkeypatch):
    broker, proxy = behind_proxy
    monkeypatch.setenv(TARGET_VARIABLE, f"kafka://127.0.0.1:{proxy.port}")
    with changing(received), publishing(received):
        published_more(received, 50)
        proxy.fall_silent()
        wait_until(lambda: "sent again" in received.log_tail(), 120, "the publisher to notice")
        proxy.speak_again()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, broker)


@pytest.fixture
def on_small_disk(tmp_path: Path) -> Iterator[tuple[KafkaBroker, Disk]]:
    with disk(tmp_path) as small:
        broker = KafkaBroker(small.folder)
        broker.start()
        try:
            yield broker, small
        finally:
            broker.stop()


def test_a_full_disk_holds_the_publisher_until_there_is_room_again(received, on_small_disk, monkeypatch):
    """A broker whose disk is full ends; whoever gives it room starts it again."""
    broker, small = on_small_disk
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    KafkaTopics(broker.servers, "db").make("public.t", 3)
    with changing(received), publishing(received):
        published_more(received, 50)
        small.fill()
        wait_until(lambda: "tried again in" in received.log_tail(), 120, "the publisher to notice")
        broker.kill()
        small.free()
        broker.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, broker)
