"""Kafka's transactions: consumers see whole transactions of the source, whatever fails meanwhile."""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from airflow_provider_pgrepl.errors import TargetError
from airflow_provider_pgrepl.replication.app import process
from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.events.event import Event
from airflow_provider_pgrepl.replication.events.position import EventPosition
from airflow_provider_pgrepl.replication.events.publish.record import read_record
from airflow_provider_pgrepl.replication.events.reader import ChangeReader
from airflow_provider_pgrepl.replication.events.targets.base import PendingEvents
from airflow_provider_pgrepl.replication.events.targets.kafka import Kafka
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from demo.kafka import KafkaBroker
from tests.support.kafka import KafkaMessage, KafkaTopics
from tests.support.publishing import (
    IMPATIENT,
    Changes,
    at_work,
    finish,
    kill,
    killed_amid_sending,
    published_more,
    publishing,
    start,
    wait_for_failures,
)
from tests.support.received import Received
from tests.support.replicated import execute, wait_until

LARGE = 45_000
"""Changes: several batches of a publisher."""


@pytest.fixture
def received(dsn: str, tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch) -> Received:
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    execute(
        dsn,
        "create table t(id int primary key, v text)",
        "create table other(id int primary key, v text)",
    )
    received = Received(dsn, tmp_path, ("public.t", "public.other"), flush_interval_s=0.05)
    received.begin()
    configure(received)
    topics_of(received, kafka).make("public.t", 1)
    return received


def configure(received: Received, **settings: str) -> None:
    topic = f"{received.pipeline.name}.{{schema}}.{{table}}"
    given = {"target": "kafka", "topic": topic, "transactions": True, **settings}
    received.configure(publishers={"events": given})


def topics_of(received: Received, kafka: KafkaBroker) -> KafkaTopics:
    """Return the topics of the test's own publisher, at a broker of many tests."""
    return KafkaTopics(kafka.servers, received.pipeline.name)


def messages(received: Received, kafka: KafkaBroker) -> list[KafkaMessage]:
    """Return the committed messages."""
    return topics_of(received, kafka).messages()


def publish_all(received: Received, kafka: KafkaBroker) -> None:
    finish(received)
    await_ends(received, kafka)


def await_ends(received: Received, kafka: KafkaBroker) -> None:
    """Wait until consumers may read all that is there."""
    wait_until(topics_of(received, kafka).has_no_open_transaction, what="the transactions' ends")


def sizes(received: Received) -> dict[tuple[str, str], int]:
    """Return the number of changes in the changelog, by table and commit LSN."""
    changes = itertools.chain.from_iterable(ChangeReader(received.pipeline).read())
    return Counter((one.table, str(one.commit_lsn)) for one in changes)


def seen(found: list[KafkaMessage]) -> dict[tuple[str, str, str], int]:
    """Return the number of changes in the messages, by table, commit LSN and generation of the sending."""
    values = ((one.value, one.headers["generation"]) for one in found)
    return Counter((value["table"], value["commit_lsn"], generation) for value, generation in values if value)


def assert_whole(received: Received, found: list[KafkaMessage]) -> None:
    """Check that no generation holds a part of a transaction, or a transaction twice."""
    wanted = sizes(received)
    for (table, lsn, _), count in seen(found).items():
        assert count == wanted[table, lsn]


def assert_all_arrived(received: Received, kafka: KafkaBroker) -> None:
    found = messages(received, kafka)
    assert_whole(received, found)
    assert {(table, lsn) for table, lsn, _ in seen(found)} == set(sizes(received))
    for _, sent in itertools.groupby(found, lambda one: (one.topic, one.headers["generation"])):
        places = [one.order[1] for one in sent]
        assert places == sorted(places)


@contextmanager
def transfers(received: Received) -> Iterator[Changes]:
    """Transactions of many sizes, over both tables, while the block runs."""
    over, chance, changes = threading.Event(), random.Random(9), Changes()

    def change() -> None:
        for number in itertools.count(0, 1_000):
            some = chance.choice((1, 3, 40, 300))
            execute(
                received.dsn,
                f"begin; insert into t select g, 'x' from generate_series({number}, {number + some}) g;"
                f" insert into other select g, 'x' from generate_series({number}, {number + some // 2}) g;"
                " commit",
            )
            changes.made += 1
            if over.wait(0.1):
                return

    with at_work(received, change, over):
        yield changes


def test_large_transaction_of_many_batches_arrives_as_one(received, kafka):
    execute(
        received.dsn,
        f"begin; insert into t select g, 'x' from generate_series(1, {LARGE}) g;"
        " insert into other values (1, 'x'); commit",
        "insert into other values (2, 'x')",
    )
    received.receive()
    counts = []
    running = start(received, "--until", "caught-up")
    while running.poll() is None:
        counts.append(len(messages(received, kafka)))
    assert running.wait() == 0
    assert_all_arrived(received, kafka)
    of_t = [count for count in counts if count < LARGE]
    assert set(of_t) <= {0, 1, 2}, "the first transaction's other table has one"
    assert len(of_t) > 2, "nobody has looked while it was sent"


@pytest.mark.real_kill
def test_consumers_see_whole_transactions_when_publisher_is_killed_again_and_again(received, kafka):
    chance = random.Random(5)
    with transfers(received) as changes:
        for _ in range(5):
            killed_amid_sending(received, changes, chance, 15)
            assert_whole(received, messages(received, kafka))
    publish_all(received, kafka)
    assert_all_arrived(received, kafka)


@pytest.mark.real_kill
def test_publisher_killed_within_a_transaction_leaves_nothing_of_it(received, kafka):
    execute(received.dsn, f"insert into t select g, 'x' from generate_series(1, {LARGE}) g")
    received.receive()
    running = start(received)
    topics = topics_of(received, kafka)
    wait_until(lambda: topics.end("public.t") > 0, what="some of it to be there")
    kill(running)
    assert messages(received, kafka) == []
    publish_all(received, kafka)
    assert_all_arrived(received, kafka)
    assert len(messages(received, kafka)) == LARGE


def test_publisher_stopped_within_a_transaction_ends_it(received, kafka):
    """Consumers would wait for its end."""
    execute(received.dsn, f"insert into t select g, 'x' from generate_series(1, {LARGE}) g")
    received.receive()
    topics = topics_of(received, kafka)
    with publishing(received):
        wait_until(lambda: topics.end("public.t") > 0, what="some of it to be there")
    await_ends(received, kafka)
    assert len(messages(received, kafka)) in (0, LARGE)
    publish_all(received, kafka)
    assert len(messages(received, kafka)) == LARGE


@pytest.mark.real_kill
def test_consumers_see_whole_transactions_when_broker_is_killed_and_comes_back(received, kafka):
    with transfers(received), publishing(received, IMPATIENT):
        for failures in (0, 1):
            published_more(received, 50)
            kafka.kill()
            wait_for_failures(received, failures)
            kafka.start()
        published_more(received, 50)
    publish_all(received, kafka)
    assert_all_arrived(received, kafka)


def test_refused_event_stops_its_table_and_rest_of_its_transaction_arrives(received, kafka):
    topics_of(received, kafka).make("public.other", 1, **{"max.message.bytes": "3000"})
    execute(
        received.dsn,
        "begin; insert into t values (1, 'x'); insert into other values (1, repeat('x', 5000));"
        " insert into t values (2, 'x'); commit",
        "insert into t values (3, 'x'); insert into other values (2, 'x')",
    )
    received.receive()
    assert received.run("publish", "--publisher", "events", "--until", "caught-up") == process.WILL_NOT_HELP
    await_ends(received, kafka)
    found = [one.value["data"]["id"] for one in messages(received, kafka) if one.topic.endswith(".public.t")]
    assert found == [1, 2, 3]
    record = read_record(received.pipeline.lake_root, "events")
    (stopped,) = record.stopped.values()
    assert stopped.table == "public.other"
    assert "larger than it takes" in stopped.reason


def test_refused_events_are_skipped_and_all_others_arrive(received, kafka):
    topics_of(received, kafka).make("public.other", 1, **{"max.message.bytes": "3000"})
    configure(received, on_error="skip_and_record")
    execute(
        received.dsn,
        "begin; insert into t values (1, 'x'); insert into other select g, repeat('x', g % 2 * 5000)"
        " from generate_series(1, 6) g; commit",
    )
    received.receive()
    publish_all(received, kafka)
    found = [(one.value["table"], one.value["data"]["id"]) for one in messages(received, kafka) if one.value]
    assert sorted(found) == [("public.other", n) for n in (2, 4, 6)] + [("public.t", 1)]
    assert read_record(received.pipeline.lake_root, "events").skipped == 3


def test_change_without_an_event_stops_its_table_and_nothing_of_it_is_in_the_transaction(received, kafka):
    execute(
        received.dsn,
        "alter table other add at timestamptz",
        "begin; insert into t values (1, 'x'); insert into other values (1, 'x', 'now');"
        " insert into other values (2, 'x', 'infinity'); insert into t values (2, 'x'); commit",
        "insert into t values (3, 'x')",
    )
    received.receive()
    assert received.run("publish", "--publisher", "events", "--until", "caught-up") == process.WILL_NOT_HELP
    await_ends(received, kafka)
    assert [(one.value["table"], one.value["data"]["id"]) for one in messages(received, kafka)] == [
        ("public.t", 1),
        ("public.t", 2),
        ("public.t", 3),
    ]
    configure(received, on_error="skip_and_record")
    publish_all(received, kafka)
    found = [one.value["data"]["id"] for one in messages(received, kafka) if one.topic.endswith(".other")]
    assert found == [1]
    record = read_record(received.pipeline.lake_root, "events")
    assert (record.skipped, record.stopped) == (1, {})


def test_second_publisher_is_refused_and_first_goes_on(received, kafka):
    with transfers(received), publishing(received):
        published_more(received, 20)
        assert received.run("publish", "--publisher", "events") == process.RETRY_MAY_HELP
        published_more(received, 20)
    publish_all(received, kafka)
    assert_all_arrived(received, kafka)


def test_transaction_longer_than_brokers_wait_is_an_error_that_says_so(received, kafka):
    settings = received.pipeline.publisher("events")
    target = Kafka(f"{kafka.uri}?transaction.timeout.ms=1000", settings)
    target.connect()
    with closing(target):
        sending = PendingEvents([_event(1)], ends_transaction=False)
        target.send(sending)

        def has_failed() -> bool:
            target.send(PendingEvents([_event(2)], ends_transaction=False))
            return sending.wait(1.0) and sending.error is not None

        wait_until(has_failed, what="the broker to abort the transaction")
        assert isinstance(sending.error, TargetError)
        assert "transaction.timeout.ms" in sending.error.message


def _event(number: int) -> Event:
    place = EventPosition(Epoch(1), LSN(1), number)
    return Event(place, str(place), 1, "public.t", "insert", datetime.now(UTC), b"{}", key=b"1")
