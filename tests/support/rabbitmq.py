"""A real RabbitMQ broker for tests, and a consumer of its messages."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pika
import pytest

from airflow_provider_pgrepl.replication.events.position import EventPosition
from demo.rabbitmq import Broker, programs
from tests.support.replicated import wait_until

_REQUIRED = "PGREPL_REQUIRE_DEBIAN"
_WHY = "needs RabbitMQ: sh setup/rabbitmq.sh, or apt-get install rabbitmq-server"


@contextmanager
def running_broker(**settings: str) -> Iterator[Broker]:
    """A private node. Skips the test where RabbitMQ is missing, unless it is required."""
    if programs() is None:
        assert not os.environ.get(_REQUIRED), _WHY
        pytest.skip(_WHY)
    with tempfile.TemporaryDirectory(prefix="pgrepl-test-rabbitmq-") as folder:
        broker = Broker(Path(folder), settings)
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()


@dataclass(frozen=True)
class Message:
    """A message as a consumer gets it."""

    routing_key: str
    properties: pika.BasicProperties
    body: bytes

    @cached_property
    def event(self) -> dict[str, Any]:
        """The body, where it is JSON."""
        assert self.properties.content_type == "application/json"
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def id(self) -> str:
        return str(self.properties.message_id)

    @property
    def position(self) -> EventPosition:
        return EventPosition.parse(self.id)

    @property
    def generation(self) -> int:
        return int((self.properties.headers or {})["generation"])


class Queue:
    """A queue of a test's own, bound to an exchange; survives the broker's restart."""

    def __init__(self, uri: str, exchange: str, name: str, binding: str = "#", **arguments: Any) -> None:
        self._uri, self.name = uri, name
        with self._channel() as channel:
            channel.exchange_declare(exchange, "topic", durable=True)
            channel.queue_declare(name, durable=True, arguments=arguments)
            channel.queue_bind(name, exchange, binding)

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        connection = pika.BlockingConnection(pika.URLParameters(self._uri))
        try:
            yield connection.channel()
        finally:
            connection.close()

    def take(self) -> list[Message]:
        """Remove all messages from the queue, and return them."""
        found = []
        with self._channel() as channel:
            while True:
                method, properties, body = channel.basic_get(self.name, auto_ack=True)
                if method is None:
                    return found
                assert properties.delivery_mode == 2
                found.append(Message(method.routing_key, properties, body))

    def take_until(self, last: str, timeout_s: float = 150) -> list[Message]:
        """Remove all messages up to the event with ID `last`, and return them."""
        found: list[Message] = []

        def has_come() -> bool:
            found.extend(self.take())
            return any(message.id == last for message in found)

        wait_until(has_come, timeout_s, f"the event {last}")
        return found

    def delete(self) -> None:
        with self._channel() as channel:
            channel.queue_delete(self.name)


def applied(messages: list[Message]) -> list[Message]:
    """Return the messages that a consumer applies: those above the last one that it has of their table."""
    kept: list[Message] = []
    last: dict[str, tuple[int, EventPosition]] = {}
    for message in messages:
        place, table = (message.generation, message.position), message.event["table"]
        if table not in last or place > last[table]:
            last[table] = place
            kept.append(message)
    return kept
