"""A broker that dies, stalls, is full or blocked, and a publisher that is killed: every change arrives."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.events.publish.record import PublisherLog, read_record
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from demo.rabbitmq import Broker
from tests.support.publishing import (
    IMPATIENT,
    changing,
    connected,
    finish,
    killed_amid_sending,
    published_more,
    publishing,
    start,
    suffer_each_fault,
    wait_for_failures,
)
from tests.support.rabbitmq import Message, Queue, applied
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_for_end, wait_until
from tests.support.toxiproxy import running_toxiproxy


@pytest.fixture
def received(dsn: str, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    execute(dsn, "create table t(id int primary key, v int)", "create table other(id int primary key, v int)")
    received = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    received.begin()
    received.configure(
        publishers={"events": {"target": "rabbitmq", "exchange": received.pipeline.name, "unrouted": "error"}}
    )
    return received


@contextmanager
def room_again(broker: Broker) -> Iterator[None]:
    """After the block the broker has its memory and disk back, whatever happened."""
    try:
        yield
    finally:
        broker.control("set_vm_memory_high_watermark", "0.4")
        broker.control("set_disk_free_limit", "50MB")


def assert_all_arrived(received: Received, messages: list[Message], *, has_gaps: bool = False) -> None:
    """Each change, in order from generation to generation; who applies them by the rule has the source.

    `has_gaps`: the broker may have refused one and taken others behind it, before the connection ended.
    """
    changes = [change for batch in ChangeReader(received.pipeline).read() for change in batch]
    assert {message.id for message in messages} == {change.id for change in changes}
    for table in ("public.t", "public.other"):
        wanted = [change.id for change in changes if change.table == table]
        arrived: set[str] = set()
        for _, sent in itertools.groupby(of_table(messages, table), lambda message: message.generation):
            places = [wanted.index(message.id) for message in sent]
            # None comes twice in one generation, which begins with the first that may not have arrived.
            assert places == sorted(set(places))
            assert arrived.issuperset(wanted[: places[0]])
            assert has_gaps or places == list(range(places[0], places[-1] + 1))
            arrived.update(wanted[place] for place in places)
    assert_copies_equal(received, applied(messages))


def of_table(messages: list[Message], table: str) -> list[Message]:
    return [message for message in messages if message.event["table"] == table]


def assert_copies_equal(received: Received, messages: list[Message]) -> None:
    copies: dict[str, dict[int, int]] = {"public.t": {}, "public.other": {}}
    for message in messages:
        rows, event = copies[message.event["table"]], message.event
        if event["op"] == "delete":
            rows.pop(event["old"]["id"], None)
        else:
            rows[event["data"]["id"]] = event["data"]["v"]
    for table, rows in copies.items():
        with connected(received.dsn) as cursor:
            cursor.execute(f"select id, v from {table}")
            assert rows == dict(cursor.fetchall())


@pytest.mark.real_kill
@pytest.mark.parametrize(
    "kills", [2, pytest.param(6, marks=pytest.mark.thorough("the parameter 2: more kills, more moments"))]
)
def test_every_change_arrives_when_publisher_is_killed_again_and_again(received, broker, kills):
    queue, chance = Queue(broker.uri, received.pipeline.name, received.pipeline.name), random.Random(1)
    with changing(received) as changes:
        for _ in range(kills):
            killed_amid_sending(received, changes, chance)
    finish(received)
    messages = queue.take()
    # One that was killed before anything had arrived has left no trace.
    assert len({message.generation for message in messages}) > 1
    assert_all_arrived(received, messages)


@pytest.mark.real_kill
@pytest.mark.thorough("test_nats_faults: a connection stalls; the publisher is killed above")
def test_every_change_arrives_when_broker_is_killed_and_away_for_a_while(received, broker):
    queue = Queue(broker.uri, received.pipeline.name, received.pipeline.name)
    with changing(received), publishing(received):
        for failures in (0, 2):
            published_more(received, 50)
            broker.kill()
            wait_for_failures(received, failures)
            broker.start()
        published_more(received, 50)
    finish(received)
    assert_all_arrived(received, queue.take())


@pytest.mark.thorough("test_nats_faults: a connection stalls")
def test_every_change_arrives_under_faults_of_network(received, broker, monkeypatch):
    queue = Queue(broker.uri, received.pipeline.name, received.pipeline.name)
    with running_toxiproxy() as proxy:
        link = proxy.link("rabbitmq", broker.port)
        monkeypatch.setenv(TARGET_VARIABLE, broker.uri.replace(str(broker.port), str(link.port)))
        with changing(received) as changes, publishing(received, IMPATIENT):
            published_more(received, 50)
            broker.control("close_all_connections", "test")
            published_more(received, 50)
            suffer_each_fault(received, link, changes)
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    finish(received)
    assert_all_arrived(received, queue.take())


def test_full_queue_holds_publisher(received, broker):
    limits = {"x-max-length": 40, "x-overflow": "reject-publish"}
    queue = Queue(broker.uri, received.pipeline.name, received.pipeline.name, **limits)
    messages: list[Message] = []
    over = threading.Event()

    def consume() -> None:
        while not over.wait(0.5):
            messages.extend(queue.take())

    consumer = threading.Thread(target=consume)
    with changing(received) as changes:
        changes.wait_for_more(120)
    consumer.start()
    try:
        finish(received)
    finally:
        over.set()
        consumer.join()
    messages += queue.take()
    assert len({message.generation for message in messages}) > 1
    assert_all_arrived(received, messages, has_gaps=True)


@pytest.mark.parametrize(
    "shortage",
    [
        pytest.param(("set_vm_memory_high_watermark", "absolute", "1MB"), id="memory"),
        pytest.param(
            ("set_disk_free_limit", "100000GB"), id="disk", marks=pytest.mark.thorough("the parameter memory")
        ),
    ],
)
@pytest.mark.thorough("a full queue holds the publisher")
def test_broker_that_lacks_memory_or_disk_holds_publisher_which_can_be_stopped(received, broker, shortage):
    queue = Queue(broker.uri, received.pipeline.name, received.pipeline.name)
    with changing(received), room_again(broker), publishing(received):
        published_more(received, 20)
        broker.control(*shortage)
        wait_until(
            lambda: "temporarily accepts no messages" in received.log_tail(), what="the broker to block"
        )
    finish(received)
    assert_all_arrived(received, queue.take())


def test_second_publisher_is_refused_and_replaced_one_ends(received, broker):
    queue = Queue(broker.uri, received.pipeline.name, received.pipeline.name)
    with changing(received):
        running = start(received)
        try:
            published_more(received, 20)
            assert received.run("publish", "--publisher", "events") == process.RETRY_MAY_HELP
            assert "another process is at it already (publish events)" in received.log_tail()
            # As one would whose lock in the database was lost.
            other = PublisherLog(received.pipeline.lake_root, "events")
            record = read_record(received.pipeline.lake_root, "events")
            assert record is not None
            wait_until(lambda: took(other, record), what="the record to be taken")
            assert wait_for_end(running) == process.RETRY_MAY_HELP, received.log_tail()
        finally:
            kill(running)
    finish(received)
    assert_all_arrived(received, queue.take())


def took(log: PublisherLog, record) -> bool:
    try:
        log.take(record, "another")
    except Exception:
        return False
    return True
