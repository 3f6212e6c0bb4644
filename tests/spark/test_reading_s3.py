"""Spark reads a lake on S3 by Hadoop's connector: at a point, and as of a transaction."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.lake.read import arrow_view_as_of, consistent_arrow
from airflow_provider_pgrepl.replication.lake.spark_jars import CONNECTOR_FOLDER
from tests.support.replicated import Replicated, execute, kill, wait_until
from tests.support.spark_program import JARS, said_by

PROGRAM = Path(__file__).with_name("reading_s3.py")
TABLES = ("public.orders", "public.items")


@pytest.fixture
def replicated(s3_lake: str, dsn: str, tmp_path: Path) -> Replicated:
    """Points are rare in it: what is durable is newer than the newest point."""
    execute(
        dsn,
        "create table orders (id bigint primary key, state text, total numeric(12,2), at timestamptz)",
        "create table items (id uuid primary key default gen_random_uuid(), of bigint, tags text[])",
        "insert into orders select g, 'new', g / 7.0, now() from generate_series(1, 500) g",
        "insert into items (of, tags) select g, array['a', null] from generate_series(1, 500) g",
    )
    found = Replicated(dsn, tmp_path, TABLES, lake=s3_lake, merge="merge_on_read")
    found.snapshot()
    found.catch_up()
    return found


def change(replicated: Replicated) -> None:
    """Durable in the changelog, and not merged: the tables have a position before it."""
    held = {"freshness_s": 50.0, "max_staleness_s": 60.0, "points_every_s": 60.0}
    replicated.configure(**held)
    process = replicated.start("replicate")
    try:
        execute(
            replicated.dsn,
            "update orders set state = 'paid' where id % 3 = 0",
            "delete from items where of % 5 = 0",
            "insert into orders values (1001, 'late', 1.5, now())",
        )
        wait_until(lambda: counted(arrow_view_as_of(replicated.pipeline).table(TABLES[0])) == (501, 166))
    finally:
        kill(process, signal.SIGTERM)


def counted(orders: Any) -> tuple[int, int]:
    return orders.num_rows, orders.column("state").to_pylist().count("paid")


def test_spark_reads_at_a_point_and_as_of_the_newest_transaction(replicated, monkeypatch):
    change(replicated)
    said = said_by(PROGRAM, str(replicated.file), *TABLES)
    assert [table["table"] for table in said] == list(TABLES)
    point, newest = consistent_arrow(replicated.pipeline), arrow_view_as_of(replicated.pipeline)
    for table in said:
        name = table["table"]
        assert keys(table["point"]) == sorted(map(str, point.table(name).column("id").to_pylist()))
        assert keys(table["newest"]) == sorted(map(str, newest.table(name).column("id").to_pylist()))
    assert sum('"state": "paid"' in row for row in said[0]["newest"]) == 166


def keys(rows: list[str]) -> list[str]:
    return sorted(str(json.loads(row)["id"]) for row in rows)


def test_a_session_without_the_connector_says_what_to_do(replicated, tmp_path):
    jars = tmp_path / "jars"
    jars.mkdir()
    for jar in JARS.glob("*.jar"):
        (jars / jar.name).symlink_to(jar)
    assert not (jars / CONNECTOR_FOLDER).exists()
    said = said_by(PROGRAM, str(replicated.file), *TABLES, jars=jars)
    assert said[0]["error"] == "ToolError"
    assert "make s3a" in said[0]["said"]
