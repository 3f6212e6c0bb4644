"""The rate of a snapshot of a large table into the lake. The peer is psql's COPY on one connection."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.spark.session import build_session
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from benchmarks import pipelines
from benchmarks.figure import Figure, compare
from benchmarks.source import Source, running_source
from benchmarks.store import local_folder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TABLE = "public.wide"
ROWS = 5_000_000
_REPEAT = 3
_LIMIT = 0.6

CREATE = f"""create table {TABLE} (
    id bigint primary key, k integer, v text, amt numeric(12,2),
    ts timestamptz, b boolean, note text, f double precision
)"""
FILL = f"""insert into {TABLE} select
    g, g % 1000, 'value of the row ' || g, (g % 100000) / 100.0,
    timestamptz '2024-01-01' + g * interval '1 second', g % 2 = 0,
    case when g % 10 > 0 then 'a note, "quoted" every now and then: ' || g end, g / 7.0
from generate_series({{}}, {{}}) g"""


def run(folder: Path, scale: float) -> Figure:
    """Measure this package and the peer in turns."""
    rows = int(ROWS * scale)
    ours, peers = [], []
    with prepared(folder, rows) as (spark, source, state_db):
        for number in range(1, _REPEAT + 1):
            peers.append(rows / _peer(source))
            ours.append(rows / copy(spark, source, state_db, folder, str(number)))
    work = f"snapshot: {rows / 1e6:g} M rows × 8 mixed columns, local[2]"
    return compare(work, ours, peers, _LIMIT, "rows/s", "psql COPY (FORMAT csv) to /dev/null")


@contextmanager
def prepared(
    folder: Path, rows: int, spark: SparkSession | None = None
) -> Iterator[tuple[SparkSession, Source, StateDatabase]]:
    """Yield Spark, warmed up by a small copy, a source with the table, and the state database.

    `spark`: the session, by default one with local[2]. It is stopped at the end of the block.
    """
    spark = spark or build_session("pgrepl benchmark", "local[2]", {"spark.log.level": "ERROR"}, delta=False)
    try:
        with running_source() as source, StateDatabase(source.dsn, "benchmark") as state_db:
            state_db.migrate()
            source.execute(CREATE)
            source.execute(FILL.format(1, 1000))
            copy(spark, source, state_db, folder, "warm")
            source.execute(FILL.format(1001, rows))
            source.settle()
            _peer(source)  # not measured: reads the files into the cache
            yield spark, source, state_db
    finally:
        spark.stop()


def copy(spark: SparkSession, source: Source, state_db: StateDatabase, folder: Path, name: str) -> float:
    """Return the seconds of a copy into a new lake named `name`, and delete the lake."""
    pipeline = pipelines.make_pipeline(folder, f"snapshot_{name}", TABLE)
    pipelines.publish(source.dsn, pipeline)
    started = time.perf_counter()
    pipelines.take_snapshot(spark, source.dsn, pipeline, state_db)
    seconds = time.perf_counter() - started
    source.execute("select pg_drop_replication_slot(%s)", pipeline.slot)
    shutil.rmtree(local_folder(pipeline.lake_root))
    return seconds


def _peer(source: Source) -> float:
    columns = "id, k, v, amt, ts, b, note, f"
    command = f"copy (select {columns} from {TABLE}) to stdout (format csv)"
    return source.time_program("psql", "-X", "-q", "-c", command, source.dsn)
