"""A real Kafka broker for tests, and a consumer of its topics."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from airflow_provider_pgrepl.replication.events.position import EventPosition
from demo.kafka import KafkaBroker, is_there
from tests.support import class_archive

_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs Kafka: sh setup/kafka.sh"


class SmallBroker(KafkaBroker):
    """A broker that starts with a third of the CPU time: it optimizes no code, and reads archived classes."""

    java_options = (
        *KafkaBroker.java_options,
        "-XX:TieredStopAtLevel=1",
        *class_archive.options().split(),
    )


@contextmanager
def running_kafka(settings: str = "", protocol: str = "PLAINTEXT") -> Iterator[KafkaBroker]:
    """A private broker. Skips the test where Kafka is missing, unless it is required."""
    if not is_there():
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-kafka-") as folder:
        broker = SmallBroker(Path(folder), settings, protocol)
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


@dataclass(frozen=True)
class KafkaMessage:
    """A message as a consumer gets it."""

    topic: str
    partition: int
    key: str
    value: dict[str, Any] | None
    headers: dict[str, str]
    timestamp: int

    @property
    def id(self) -> str:
        return self.headers["id"]

    @property
    def is_left(self) -> bool:
        """Return True if the message reports that a change removed the row with the old key."""
        return self.id.endswith(":old")

    @property
    def order(self) -> tuple[int, EventPosition, bool]:
        """Return the sort key of the how-to: a message not above the last of its partition is a repeat."""
        position = EventPosition.parse(self.id.removesuffix(":old"))
        return int(self.headers["generation"]), position, not self.is_left


@dataclass(frozen=True)
class RawMessage:
    """A message as it is in its topic, in bytes."""

    topic: str
    key: bytes | None
    value: bytes | None


class KafkaTopics:
    """The topics of one publisher, read from their beginnings at each `messages`."""

    def __init__(self, servers: str, prefix: str) -> None:
        self._servers, self._prefix = servers, prefix
        self._admin = AdminClient({"bootstrap.servers": servers})

    def make(self, table: str, partitions: int, **settings: str) -> None:
        name = f"{self._prefix}.{table}"
        made = self._admin.create_topics([NewTopic(name, partitions, config=settings)])
        made[name].result()

    def end(self, table: str) -> int:
        """The offset behind a topic's first partition."""
        return self._ends([TopicPartition(f"{self._prefix}.{table}", 0)], "read_uncommitted")[0]

    def has_no_open_transaction(self) -> bool:
        """Return True if consumers may read all that is there.

        The broker writes the marks of a transaction's end into its partitions after it has confirmed the end.
        """
        partitions = self._partitions()
        return self._ends(partitions, "read_committed") == self._ends(partitions, "read_uncommitted")

    def _ends(self, partitions: list[TopicPartition], level: str) -> list[int]:
        given = {"bootstrap.servers": self._servers, "group.id": "test", "isolation.level": level}
        with closing(Consumer(given)) as consumer:
            return [int(consumer.get_watermark_offsets(one, timeout=120)[1]) for one in partitions]

    def raw(self) -> list[RawMessage]:
        """Return the messages of the topics in bytes."""
        return [RawMessage(one.topic(), one.key(), one.value()) for one in self._read()]

    def messages(self) -> list[KafkaMessage]:
        """Return all messages of the topics, by topic, in the order of each partition."""
        return [_message(one) for one in self._read()]

    def _read(self) -> list[Message]:
        with closing(Consumer({"bootstrap.servers": self._servers, **_READER})) as consumer:
            found = list(_up_to_the_ends(consumer, self._partitions()))
        return sorted(found, key=lambda one: (one.topic(), one.partition(), one.offset()))

    def _partitions(self) -> list[TopicPartition]:
        """Return the partitions of the topics, at their beginnings."""
        return [
            TopicPartition(name, number, OFFSET_BEGINNING)
            for name, topic in self._admin.list_topics(timeout=120).topics.items()
            if name.startswith(f"{self._prefix}.")
            for number in topic.partitions
        ]


_READER = {
    "group.id": "test",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    # By default the broker keeps a consumer that is at the end of a partition waiting for half a second.
    "fetch.wait.max.ms": 10,
}


def _up_to_the_ends(consumer: Consumer, partitions: list[TopicPartition]) -> Iterator[Message]:
    """Yield the committed messages of the partitions."""
    left = {(one.topic, one.partition) for one in partitions}
    consumer.assign(partitions)
    while left:
        one = consumer.poll(120)
        assert one is not None, left
        if not one.error():
            yield one
        elif one.error().code() == KafkaError._PARTITION_EOF:
            left.discard((one.topic(), one.partition()))
        else:
            raise KafkaException(one.error())


def _message(one: Any) -> KafkaMessage:
    value = one.value()
    headers = {name: given.decode() for name, given in one.headers() or ()}
    return KafkaMessage(
        one.topic(),
        one.partition(),
        one.key().decode(),
        None if value is None else json.loads(value),
        headers,
        one.timestamp()[1],
    )


def applied(messages: list[KafkaMessage]) -> list[KafkaMessage]:
    """Return the messages that a consumer applies: those above the last one of their partition."""
    kept: list[KafkaMessage] = []
    last: dict[tuple[str, int], Any] = {}
    for message in messages:
        place = message.topic, message.partition
        if message.value is not None and message.order > last.get(place, (0,)):
            last[place] = message.order
            kept.append(message)
    return kept


def kept_rows(messages: list[KafkaMessage]) -> dict[str, dict[str, Any]]:
    """The rows of each table, kept by key and partition."""
    tables: dict[str, dict[tuple[int, str], Any]] = {}
    for message in applied(messages):
        assert message.value is not None
        rows = tables.setdefault(message.value["table"], {})
        if message.value["op"] == "truncate":
            for place in [place for place in rows if place[0] == message.partition]:
                del rows[place]
        elif message.value["op"] == "delete":
            rows.pop((message.partition, message.key), None)
        else:
            rows[message.partition, message.key] = message.value["data"]
    return {table: {key: row for (_, key), row in rows.items()} for table, rows in tables.items()}
