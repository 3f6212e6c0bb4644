"""docs/how-to/publish-to-rabbitmq.md: its consumer keeps a copy exactly, however often anybody is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from demo.rabbitmq import Broker
from tests.conftest import closing_connection
from tests.support.pages import blocks, rows_of, statement, wait_until_applied
from tests.support.publishing import finish
from tests.support.rabbitmq import Queue
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


@pytest.mark.real_kill
@pytest.mark.thorough("fault/test_publishing_faults.py kills a publisher and applies by the rule of the page")
def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "rabbitmq", "exchange": "pgrepl.shop"}})
    chance = random.Random(11)
    monkeypatch.setenv(TARGET_VARIABLE, broker.uri)
    Queue(broker.uri, "pgrepl.shop", "orders_copy", "public.orders.*")
    consume = [sys.executable, str(script), broker.uri, str(file)]
    for _ in range(3):
        since = received.durable_lsn
        execute(dsn, *(statement(chance) for _ in range(300)))
        received.receive()
        consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
        publisher = received.start("publish", "--publisher", "events")
        try:
            wait_until_applied(received, chance, since, lambda: _applied(file))
        finally:
            kill(publisher)
            kill(consumer)
    # The queue is read in its order: who has this has all.
    execute(dsn, "insert into orders values (1000, 1)")
    received.receive()
    finish(received)
    consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
    try:
        last = "select id from orders where id = 1000"
        wait_until(lambda: rows_of(file, last), 240, "the queue to be read")
    finally:
        kill(consumer)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, amount::text from orders order by id")
        expected = cursor.fetchall()
    assert rows_of(file, "select id, amount from orders order by id") == expected


def _applied(file: Path) -> int:
    return max((lsn for (lsn,) in rows_of(file, "select lsn from place")), default=0)
