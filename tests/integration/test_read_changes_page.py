"""docs/how-to/read-changes.md: its program keeps a copy exactly, however often it is killed."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from airflow_provider_pgrepl.replication.events.position import EventPosition
from tests.conftest import closing_connection
from tests.support.pages import blocks, rows_of, wait_until_applied
from tests.support.received import Received
from tests.support.replicated import execute

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "read-changes.md"
LARGE = "(select string_agg(md5(g::text), '') from generate_series(1, 500) g)"


@pytest.mark.real_kill
@pytest.mark.thorough("test_change_stream.py reads changes from any place on, each once and in order")
def test_the_program_of_the_page_keeps_a_copy_whenever_it_is_killed(dsn: str, tmp_path: Path) -> None:
    (program,) = (block for block in blocks(PAGE.read_text(), "python") if "apply" in block)
    script = tmp_path / "keep_copy.py"
    script.write_text(program)
    execute(
        dsn,
        "create table orders(id int primary key, customer text, doc text)",
        "alter table orders alter doc set storage external",
    )
    received = Received(dsn, tmp_path, ("public.orders",), flush_interval_s=0.05)
    received.begin()
    file = tmp_path / "copy.db"
    command = [sys.executable, str(script), received.pipeline.lake_root, str(file)]
    chance = random.Random(7)
    for _ in range(4):
        since = received.durable_lsn
        execute(dsn, *(_statement(chance) for _ in range(300)))
        received.receive()
        running = subprocess.Popen(command, cwd=ROOT)
        try:
            wait_until_applied(received, chance, since, lambda: _applied(file))
        finally:
            running.kill()
            running.wait()
    subprocess.run([*command, "--once"], cwd=ROOT, check=True, timeout=300)
    with closing_connection(dsn) as connection, connection.cursor() as cursor:
        cursor.execute("select id, customer, doc from orders order by id")
        expected = cursor.fetchall()
    rows = [json.loads(row) for (row,) in rows_of(file, "select row from orders order by id")]
    assert [(row["id"], row["customer"], row["doc"]) for row in rows] == expected
    assert expected


def _applied(file: Path) -> int:
    return max(
        (EventPosition.parse(id_).commit_lsn for (id_,) in rows_of(file, "select id from place")), default=0
    )


def _statement(chance: random.Random) -> str:
    key = chance.randint(1, 40)
    doc = LARGE if chance.random() < 0.3 else "'short'"
    return chance.choice(
        [
            f"insert into orders values ({key}, 'i{chance.random()}', {doc}) on conflict do nothing",
            f"update orders set customer = 'u{chance.random()}' where id % 10 = {key % 10}",
            f"update orders set id = {key + 40} where id = {key}"
            f" and not exists (select from orders where id = {key + 40})",
            f"delete from orders where id = {key}",
            "truncate orders" if chance.random() < 0.02 else "select",
        ]
    )
