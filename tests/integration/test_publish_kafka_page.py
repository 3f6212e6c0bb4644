"""docs/how-to/publish-to-kafka.md: its consumer keeps a copy exactly, however often anybody is killed."""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.config import Pipeline
from tests.conftest import closing_connection
from tests.support.kafka import KafkaTopics, running_kafka
from tests.support.pages import blocks, statement
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "publish-to-kafka.md").read_text()


def test_the_pipeline_of_the_page_is_a_valid_one() -> None:
    (pipeline,) = map(Pipeline.from_json, blocks(PAGE, "json"))
    assert pipeline.publisher("events").topic == "shop.{schema}.{table}"
    assert pipeline.publisher("events").conn_id == "pgrepl_kafka"


def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, monkeypatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "kafka", "topic": "shop.{schema}.{table}"}})
    chance = random.Random(12)
    with running_kafka() as broker:
        monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
        KafkaTopics(broker.servers, "shop").make("public.orders", 3)
        command = [sys.executable, str(script), broker.servers, str(file)]
        for _ in range(3):
            execute(dsn, *(statement(chance) for _ in range(300)))
            received.receive()
            consumer = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
            publisher = received.start("publish", "--publisher", "events")
            time.sleep(chance.uniform(4.0, 8.0))
            kill(publisher)
            kill(consumer)
        assert received.run("publish", "--publisher", "events", "--until", "caught-up") == 0, (
            received.log_tail()
        )
        with closing_connection(dsn) as connection, connection.cursor() as cursor:
            cursor.execute("select id, amount::text from orders order by id")
            expected = cursor.fetchall()
        assert expected
        consumer = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            # The broker waits 45 s for the consumer that was killed before it gives its partitions away.
            wait_until(lambda: rows(file) == expected, 240, "the copy to be the source")
            time.sleep(3)
        finally:
            kill(consumer)
    assert rows(file) == expected


def rows(file: Path) -> list[tuple[int, str]]:
    with closing(sqlite3.connect(file, timeout=120)) as copy:
        return copy.execute("select id, amount from orders order by id").fetchall()
