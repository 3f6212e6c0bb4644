"""docs/how-to/publish-to-kafka.md: its consumer keeps a copy exactly, however often anybody is killed."""

from __future__ import annotations

import random
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo.kafka import KafkaBroker
from tests.conftest import closing_connection
from tests.support.kafka import KafkaTopics
from tests.support.pages import blocks, rows_of, statement, wait_until_applied
from tests.support.publishing import finish
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "publish-to-kafka.md").read_text()


def test_the_pipeline_of_the_page_is_a_valid_one() -> None:
    (pipeline,) = map(Pipeline.from_json, blocks(PAGE, "json"))
    assert pipeline.publisher("events").topic == "shop.{schema}.{table}"
    assert pipeline.publisher("events").conn_id == "pgrepl_kafka"


@pytest.mark.real_kill
def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    # By default the broker gives the partitions of a consumer that was killed to the next one after 45 s.
    sooner = '"enable.auto.commit": False, "session.timeout.ms": 10000'
    assert program.count('"enable.auto.commit": False') == 1
    script.write_text(program.replace('"enable.auto.commit": False', sooner))
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "kafka", "topic": "shop.{schema}.{table}"}})
    chance = random.Random(12)
    monkeypatch.setenv(TARGET_VARIABLE, kafka.uri)
    KafkaTopics(kafka.servers, "shop").make("public.orders", 3)
    command = [sys.executable, str(script), kafka.servers, str(file)]
    for _ in range(3):
        since = received.durable_lsn
        execute(dsn, *(statement(chance) for _ in range(300)))
        received.receive()
        consumer = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        publisher = received.start("publish", "--publisher", "events")
        try:
            wait_until_applied(received, chance, since, lambda: _applied(file))
        finally:
            kill(publisher)
            kill(consumer)
    finish(received)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, amount::text from orders order by id")
        expected = cursor.fetchall()
    assert expected
    consumer = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        wait_until(lambda: _is_read(kafka.servers), 240, "all partitions to be read")
    finally:
        kill(consumer)
    assert rows_of(file, "select id, amount from orders order by id") == expected


def _applied(file: Path) -> int:
    return max((lsn for (lsn,) in rows_of(file, "select lsn from place")), default=0)


def _is_read(servers: str) -> bool:
    """Return True if the consumer has committed the end of each partition."""
    partitions = [TopicPartition("shop.public.orders", number) for number in range(3)]
    with closing(Consumer({"bootstrap.servers": servers, "group.id": "orders_copy"})) as consumer:
        ends = [consumer.get_watermark_offsets(one, timeout=60)[1] for one in partitions]
        committed = [one.offset for one in consumer.committed(partitions, timeout=60)]
    return all(at == end or end == 0 for at, end in zip(committed, ends, strict=True))
