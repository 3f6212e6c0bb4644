"""The thread that gives most tests their batches gives the same ones as Spark's streaming query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow_provider_pgrepl.replication.lake.apply.changelog_source import FORMAT, ChangelogSource
from tests.support.in_process import Borrowed
from tests.support.received import Received
from tests.support.replicated import execute, wait_until


def batches_of(session: Any, uri: str, checkpoint: Path) -> list[list[str]]:
    """Run a query that ends by itself, and return the work of each of its batches."""
    found: list[list[str]] = []
    frame = session.readStream.format(FORMAT).option("uri", uri).option("batch_bytes", "1").load()
    query = (
        frame.writeStream.option("checkpointLocation", checkpoint.as_uri())
        .foreachBatch(lambda frame, _number: found.append([row.work for row in frame.collect()]))
        .trigger(availableNow=True)
        .start()
    )
    wait_until(lambda: not query.isActive, what="the query to end")
    assert query.exception() is None
    return found


def test_batches_are_those_of_sparks_query(spark, dsn, tmp_path):
    """From the changelog's newest commit on at first, and from where the query before ended later."""
    execute(dsn, "create table t (id int primary key)", "create table u (id int primary key)")
    received = Received(dsn, tmp_path, ("public.t", "public.u"))
    received.begin()
    spark.dataSource.register(ChangelogSource)
    real, direct = Borrowed(spark, real_query=True), Borrowed(spark)
    for statements in (
        ("insert into t values (1)",),
        ("insert into t values (2)", "insert into u values (2)"),
        (),
    ):
        for statement in statements:
            execute(dsn, statement)
            received.receive()
        by_spark = batches_of(real, received.changelog, tmp_path / "real")
        by_thread = batches_of(direct, received.changelog, tmp_path / "direct")
        assert by_thread == by_spark
        assert len(by_spark) >= len(statements)
