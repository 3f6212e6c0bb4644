"""The services of the demo rebuild rows from the events of a broker alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from demo.events import KEYS, Events, Service
from demo.kafka import KafkaBroker
from demo.kafka_events import KafkaEvents, KafkaService
from demo.nats import NatsServer
from demo.nats_events import NatsEvents, NatsService
from demo.rabbitmq import Broker
from demo.rabbitmq_events import RabbitMQEvents, RabbitMQService
from tests.support.published import Published
from tests.support.replicated import execute, wait_until


@pytest.fixture
def bank(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Published:
    """The tables of pgbench that have a key, as `pgbench -i` makes them, received from here on."""
    monkeypatch.setenv("PGREPL_DSN", dsn)
    execute(
        dsn,
        "create table pgbench_branches(bid int primary key, bbalance int, filler char(88))",
        "create table pgbench_tellers(tid int primary key, bid int, tbalance int, filler char(84))",
        "create table pgbench_accounts(aid int primary key, bid int, abalance int, filler char(84))",
    )
    pipeline = Published(dsn, tmp_path, tuple(KEYS), flush_interval_s=0.05)
    pipeline.begin()
    return pipeline


def test_service_rebuilds_rows_from_rabbitmq(bank, broker: Broker, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    service = RabbitMQService(broker.uri)
    service.prepare()
    check_rebuilt(bank, RabbitMQEvents(bank.file.parent), service)


def test_service_rebuilds_rows_from_nats(bank, jetstream: NatsServer, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, jetstream.uri)
    check_rebuilt(bank, NatsEvents(bank.file.parent), NatsService(jetstream.uri))


def test_service_rebuilds_rows_from_kafka(bank, kafka: KafkaBroker, monkeypatch):
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    check_rebuilt(bank, KafkaEvents(bank.file.parent), KafkaService(kafka.servers))


def check_rebuilt(bank: Published, events: Events, service: Service) -> None:
    """Publish three transactions. A row changed behind the service's back must show as different."""
    bank.configure(publishers=events.publishers)
    events.service = service
    service.start()
    try:
        execute(bank.dsn, "insert into pgbench_branches select b, 0 from generate_series(1, 3) b")
        execute(bank.dsn, "insert into pgbench_accounts select a, 1, 0 from generate_series(1, 200) a")
        before = bank.source_lsn()
        execute(bank.dsn, "update pgbench_accounts set abalance = aid where aid % 2 = 0")
        bank.receive()
        assert bank.run_publisher() == 0
        wait_until(lambda: events.has_reached(before) and service.counts.total() == 303, 60, "all events")
        assert "303 events" in events.line()
        assert [different for _, different in events.compare(bank.dsn)] == [0, 0, 0]
        assert [len(rows) for rows in service.rows.values()] == [200, 0, 3]
        execute(bank.dsn, "update pgbench_accounts set abalance = -1 where aid = 7")
        assert [different for _, different in events.compare(bank.dsn)] == [1, 0, 0]
    finally:
        service.stop()
