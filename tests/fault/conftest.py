"""Brokers that the tests of a file share, which kill them and start them again.

Of a module and not of the session: xdist then gives the file to one worker, and one broker is started for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

import pytest

from demo.kafka import KafkaBroker
from demo.rabbitmq import Broker
from demo.server_process import ServerProcess
from tests.support.kafka import running_kafka
from tests.support.rabbitmq import running_broker

_Server = TypeVar("_Server", bound=ServerProcess)


@pytest.fixture(scope="module")
def kafka_broker() -> Iterator[KafkaBroker]:
    """A Kafka that soon aborts transactions that take too long; a test may have left it stopped."""
    with running_kafka("transaction.abort.timed.out.transaction.cleanup.interval.ms=500") as broker:
        yield broker


@pytest.fixture
def kafka(kafka_broker: KafkaBroker) -> KafkaBroker:
    """The same, at work."""
    return _at_work(kafka_broker)


@pytest.fixture(scope="module")
def rabbitmq() -> Iterator[Broker]:
    """A RabbitMQ; a test may have left it stopped."""
    with running_broker() as broker:
        yield broker


@pytest.fixture
def broker(rabbitmq: Broker) -> Broker:
    """The same, at work."""
    return _at_work(rabbitmq)


def _at_work(server: _Server) -> _Server:
    if not server.answers():
        server.kill()
        server.start()
    return server
