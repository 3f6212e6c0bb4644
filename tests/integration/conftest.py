"""Fixtures of the tests that need a server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from demo.kafka import KafkaBroker
from demo.nats import NatsServer
from demo.rabbitmq import Broker
from demo.versitygw import Gateway, environment_of
from tests.support.faulty_store import FaultyStore, faulty_store
from tests.support.jetstream import running_nats
from tests.support.kafka import running_kafka
from tests.support.published import Published, begin_publishing
from tests.support.registry import Registry, running_registry
from tests.support.replicated import execute
from tests.support.state_records import pipeline
from tests.support.watched import SHAPE, Watched

_KAFKA = (
    "authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer\n"
    "allow.everyone.if.no.acl.found=true\n"
    "group.min.session.timeout.ms=500"
)
"""Denies what a test denies by an ACL. Consumers may choose a session timeout of less than 6 s."""


@pytest.fixture(scope="session")
def jetstream() -> Iterator[NatsServer]:
    """A NATS server until the tests end, which takes payloads of up to 120,000 bytes.

    Streams are named after a test's pipeline, and so are its own.
    """
    with running_nats("max_payload: 120000") as running:
        yield running


@pytest.fixture(scope="session")
def kafka() -> Iterator[KafkaBroker]:
    """A Kafka broker until the tests end. Topics are named after a test's pipeline."""
    with running_kafka(_KAFKA) as running:
        yield running


@pytest.fixture(scope="session")
def registry() -> Iterator[Registry]:
    """A schema registry until the tests end. Subjects are named after a test's topics."""
    with running_registry() as running:
        yield running


@pytest.fixture
def run(pg):
    """Runs statements in the test's database and returns the rows of the last one; None when it has none."""

    def execute(*statements):
        with pg.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)
            return cursor.fetchall() if cursor.description else None

    return execute


@pytest.fixture
def faulty(gateway: Gateway, s3_lake: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyStore]:
    """The way to the store, which can fail; the environment leads there."""
    with faulty_store(gateway.port) as store:
        for name, value in environment_of(store.port).items():
            monkeypatch.setenv(name, value)
        yield store


@pytest.fixture
def published(dsn: str, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Published:
    """A pipeline with a publisher to RabbitMQ."""
    monkeypatch.setenv("PGREPL_DSN", dsn)
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    return begin_publishing(dsn, tmp_path, broker)


@pytest.fixture
def watched(dsn: str, tmp_path: Path) -> Watched:
    """A pipeline of the table `t`, with its event trigger."""
    execute(dsn, *SHAPE)
    pipeline = Watched(dsn, tmp_path, ("public.t",), flush_interval_s=0.05, event_trigger=True)
    pipeline.begin_watched("public.t")
    return pipeline


@pytest.fixture
def state_db(dsn: str) -> Iterator[StateDatabase]:
    """The state database, with the pipeline `shop`."""
    with StateDatabase(dsn, "test") as found:
        found.migrate()
        found.register(pipeline(), "123", True, True)
        yield found
