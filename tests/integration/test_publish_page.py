"""docs/how-to/publish-to-rabbitmq.md: its consumer keeps a copy exactly, however often anybody is killed."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pika

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.config import Pipeline
from tests.conftest import closing_connection
from tests.support.pages import blocks, statement
from tests.support.rabbitmq import Queue, running_broker
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "publish-to-rabbitmq.md").read_text()


def test_the_pipeline_of_the_page_is_a_valid_one() -> None:
    (pipeline,) = (Pipeline.from_json(block) for block in blocks(PAGE, "json") if '"publishers"' in block)
    assert pipeline.publisher("events").exchange == "pgrepl.shop"
    assert pipeline.publisher("events").conn_id == "pgrepl_rabbitmq"


def test_the_message_of_the_page_is_json() -> None:
    (message,) = (json.loads(block) for block in blocks(PAGE, "json") if '"publishers"' not in block)
    assert message["id"] == "1:0/16B3748:4"


def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, monkeypatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "rabbitmq", "exchange": "pgrepl.shop"}})
    chance = random.Random(11)
    with running_broker() as broker:
        monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
        Queue(broker.uri, "pgrepl.shop", "orders_copy", "public.orders.*")
        for _ in range(3):
            execute(dsn, *(statement(chance) for _ in range(300)))
            received.receive()
            consumer = subprocess.Popen(
                [sys.executable, str(script), broker.uri, str(file)], cwd=ROOT, start_new_session=True
            )
            publisher = received.start("publish", "--publisher", "events")
            time.sleep(chance.uniform(3.0, 6.0))
            kill(publisher)
            kill(consumer)
        assert received.run("publish", "--publisher", "events", "--until", "caught-up") == 0, (
            received.log_tail()
        )
        consumer = subprocess.Popen(
            [sys.executable, str(script), broker.uri, str(file)], cwd=ROOT, start_new_session=True
        )
        try:
            wait_until(lambda: _is_empty(broker.uri), 60, "the queue to be read")
            time.sleep(1)
        finally:
            kill(consumer)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, amount::text from orders order by id")
        expected = cursor.fetchall()
    copy = sqlite3.connect(file, timeout=120)
    rows = copy.execute("select id, amount from orders order by id").fetchall()
    copy.close()
    assert rows == expected
    assert expected


def _is_empty(uri: str) -> bool:
    with pika.BlockingConnection(pika.URLParameters(uri)) as connection:
        return connection.channel().queue_declare("orders_copy", passive=True).method.message_count == 0
