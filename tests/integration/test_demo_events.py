"""The brokers of the demo, whose services rebuild rows from events alone."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from demo import kafka, nats, rabbitmq
from demo.events import KEYS, Events
from demo.kafka_events import KafkaEvents
from demo.nats_events import NatsEvents
from demo.rabbitmq_events import RabbitMQEvents
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


@pytest.mark.thorough("test_publishing, test_publishing_to_nats; end_to_end/test_first_steps")
@pytest.mark.parametrize(
    ("broker", "is_there"),
    [
        (RabbitMQEvents, rabbitmq.programs),
        (NatsEvents, nats.program),
        (KafkaEvents, kafka.is_there),
    ],
    ids=["rabbitmq", "nats", "kafka"],
)
def test_service_rebuilds_rows(
    broker: Callable[[Path], Events],
    is_there: Callable[[], object],
    bank: Published,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishes three transactions. A row that the source then changes must show as different."""
    if not is_there():
        assert not os.environ.get("PGREPL_REQUIRE_DEBIAN")
        pytest.skip("the broker is not installed")
    events = broker(tmp_path / "broker")
    try:
        events.start()
        (given,) = map(json.loads, events.variables.values())
        monkeypatch.setenv(TARGET_VARIABLE, "{conn_type}://{host}:{port}".format(**given))
        bank.configure(publishers=events.publishers)
        execute(bank.dsn, "insert into pgbench_branches select b, 0 from generate_series(1, 3) b")
        execute(bank.dsn, "insert into pgbench_accounts select a, 1, 0 from generate_series(1, 200) a")
        before = bank.source_lsn()
        execute(bank.dsn, "update pgbench_accounts set abalance = aid where aid % 2 = 0")
        bank.receive()
        assert bank.run_publisher() == 0
        service = events.service
        assert service is not None
        wait_until(
            lambda: (events.has_reached(before) and service.counts.total() >= 303) or not service.is_alive(),
            120,
            "all events",
        )
        assert "303 events" in events.line()
        assert [different for _, different in events.compare(bank.dsn)] == [0, 0, 0]
        assert [len(rows) for rows in service.rows.values()] == [200, 0, 3]
        execute(bank.dsn, "update pgbench_accounts set abalance = -1 where aid = 7")
        assert [different for _, different in events.compare(bank.dsn)] == [1, 0, 0]
    finally:
        events.stop()
