"""docs/how-to/publish-to-nats.md: its pipeline is valid and its consumer keeps an exact copy."""

from __future__ import annotations

import json
import random
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.publisher_entry import parse_publisher
from tests.conftest import closing_connection
from tests.support.jetstream import CreekStream, running_nats
from tests.support.landed import Landed
from tests.support.pages import blocks, statement
from tests.support.publishing import publishing
from tests.support.received import Received
from tests.support.replicated import execute, kill, wait_until

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "how-to" / "publish-to-nats.md").read_text()


def test_the_pipeline_of_the_page_is_a_valid_one() -> None:
    text, in_json = blocks(PAGE, "json")
    settings = Pipeline.from_json(text).publisher("creek")
    assert (settings.namespace, settings.database, settings.conn_id) == ("CREEK", "shop", "pgrepl_nats")
    instead = parse_publisher("shop", "events", json.loads(in_json))
    assert (instead.format, instead.place) == ("json", "the stream shop")


def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, monkeypatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "nats", "database": "shop"}})
    chance = random.Random(12)
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        # The streams come with the first run.
        assert received.run("publish", "--publisher", "events", "--until", "caught-up") == 0
        consume = [sys.executable, str(script), server.uri, str(file)]
        for _ in range(3):
            execute(dsn, *(statement(chance) for _ in range(300)))
            received.receive()
            consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
            publisher = received.start("publish", "--publisher", "events")
            time.sleep(chance.uniform(2.0, 5.0))
            kill(publisher)
            kill(consumer)
        assert received.run("publish", "--publisher", "events", "--until", "caught-up") == 0, (
            received.log_tail()
        )
        last = CreekStream(server.uri, "shop").messages()[-1].stamp
        consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
        try:
            wait_until(lambda: _last_stamp(file) >= last, 60, "the stream to be read")
        finally:
            kill(consumer)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, amount::text from orders order by id")
        expected = cursor.fetchall()
    assert _rows(file, "select id, amount from orders order by id") == expected
    assert expected


def _last_stamp(file: Path) -> int:
    try:
        return _rows(file, "select max(stamp) from place")[0][0] or 0
    except sqlite3.OperationalError:
        return 0


def _rows(file: Path, query: str) -> list[tuple]:
    copy = sqlite3.connect(file, timeout=120)
    try:
        return copy.execute(query).fetchall()
    finally:
        copy.close()


def test_who_comes_late_by_the_page_has_the_whole_table(dsn: str, tmp_path: Path, monkeypatch) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "creek.snapshot" in block)
    script = tmp_path / "late.py"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    landed = Landed(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    landed.begin()
    landed.configure(publishers={"events": {"target": "nats", "database": "shop"}})
    monkeypatch.setenv("PGREPL_DSN", dsn)
    execute(dsn, "insert into orders select g, g / 4.0 from generate_series(1, 500) g")
    landed.receive()
    landed.apply()
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        with publishing(landed):
            wait_until(lambda: CreekStream(server.uri, "shop").schemas(), 90, "the publisher to be there")
            late = subprocess.Popen(
                [sys.executable, str(script), server.uri, "10"], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            execute(dsn, "delete from orders where id % 2 = 0", "update orders set amount = 1 where id < 100")
            landed.receive()
            said, _ = late.communicate(timeout=120)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*), sum(amount)::numeric(20, 2) from orders")
        count, total = cursor.fetchone()
    assert said == f"{count} orders, {total} in all\n"
