"""docs/how-to/publish-to-nats.md: its pipeline is valid and its consumer keeps an exact copy."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.app.process import TARGET_VARIABLE
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.publisher import parse_publisher
from tests.conftest import closing_connection
from tests.support.jetstream import CreekStream, running_nats
from tests.support.landed import Landed
from tests.support.pages import blocks, rows_of, statement, wait_until_applied
from tests.support.publishing import finish, publishing_in_thread
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


@pytest.mark.real_kill
@pytest.mark.thorough("fault/test_nats_faults.py kills a publisher and applies by the rule of the page")
def test_the_consumer_of_the_page_keeps_a_copy_whoever_is_killed(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = (block for block in blocks(PAGE, "python") if "def apply" in block)
    script, file = tmp_path / "consume.py", tmp_path / "copy.db"
    script.write_text(program)
    execute(dsn, "create table orders(id int primary key, amount numeric)")
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    received.configure(publishers={"events": {"target": "nats", "database": "shop"}})
    chance = random.Random(12)
    # A server of its own, as the page's streams have fixed names.
    with running_nats() as server:
        monkeypatch.setenv(TARGET_VARIABLE, server.uri)
        # The streams come with the first run.
        finish(received)
        consume = [sys.executable, str(script), server.uri, str(file)]
        for _ in range(3):
            since = received.durable_lsn
            execute(dsn, *(statement(chance) for _ in range(300)))
            received.receive()
            consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
            publisher = received.start("publish", "--publisher", "events")
            try:
                wait_until_applied(received, chance, since, lambda: _last_stamp(file))
            finally:
                kill(publisher)
                kill(consumer)
        finish(received)
        last = CreekStream(server.uri, "shop").messages()[-1].stamp
        consumer = subprocess.Popen(consume, cwd=ROOT, start_new_session=True)
        try:
            wait_until(lambda: _last_stamp(file) >= last, 240, "the stream to be read")
        finally:
            kill(consumer)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, amount::text from orders order by id")
        expected = cursor.fetchall()
    assert rows_of(file, "select id, amount from orders order by id") == expected
    assert expected


def _last_stamp(file: Path) -> int:
    return max((stamp for (stamp,) in rows_of(file, "select stamp from place")), default=0)


@pytest.mark.thorough("test_snapshots_to_nats.py rebuilds a table from a snapshot and what follows it")
def test_late_consumer_example_from_page_reads_whole_table(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        with publishing_in_thread(landed):
            wait_until(lambda: CreekStream(server.uri, "shop").schemas(), 150, "the publisher to be there")
            late = subprocess.Popen(
                [sys.executable, str(script), server.uri, "10"], cwd=ROOT, stdout=subprocess.PIPE, text=True
            )
            execute(dsn, "delete from orders where id % 2 = 0", "update orders set amount = 1 where id < 100")
            landed.receive()
            said, _ = late.communicate(timeout=240)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select count(*), sum(amount)::numeric(20, 2) from orders")
        count, total = cursor.fetchone()
    assert said == f"{count} orders, {total} in all\n"
