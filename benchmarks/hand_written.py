"""The peer of `by_hand`: changes arrive as a Parquet file per second, and Spark merges them in batches."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.lake_bytes import stored_bytes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_CHANGES_PER_S = 1_000
_SCHEMA = "id bigint, k int, v string, amt decimal(12,2), ts timestamp, lsn bigint"
_MERGE = """merge into delta.`{table}` as t
using (
    select id, k, v, amt, ts from (
        select *, row_number() over (partition by id order by lsn desc) as newest from changes
    ) where newest = 1
) as s
on t.id = s.id
when matched then update set *
when not matched then insert *"""


@dataclass(frozen=True)
class HandWritten:
    """The duration of batches in seconds, without the first, and the bytes written for a change."""

    p50_s: float
    longest_s: float
    batches: int
    bytes_per_change: float

    def __str__(self) -> str:
        return (
            f"{self.batches} batches, p50 {self.p50_s:.1f} s, longest {self.longest_s:.1f} s,"
            f" {self.bytes_per_change:,.0f} bytes a change"
        )


def stream(spark: SparkSession, folder: Path, rows: int, vectors: bool, seconds: float) -> HandWritten:
    """Merge `seconds` of changes to random rows of a table, with deletion vectors if `vectors`."""
    table, changes = folder / "table", folder / "changes"
    changes.mkdir(parents=True)
    _make_table(spark, table, rows, vectors)

    def merge(batch: DataFrame, _number: int) -> None:
        batch.createOrReplaceTempView("changes")
        batch.sparkSession.sql(_MERGE.format(table=table))

    before = stored_bytes(table)
    with _writing(changes, rows):
        frame = spark.readStream.schema(_SCHEMA).parquet(str(changes))
        query = frame.writeStream.foreachBatch(merge).option("checkpointLocation", f"{folder}/state").start()
        query.awaitTermination(int(seconds))
    query.processAllAvailable()
    query.stop()
    batches = [progress for progress in query.recentProgress if progress["numInputRows"]]
    hot = [progress["batchDuration"] / 1000 for progress in batches[1:] or batches]
    # Count the changes by their files: Spark counts rows each time that MERGE reads them.
    merged = len(list(changes.glob("[0-9]*.parquet"))) * _CHANGES_PER_S
    written = stored_bytes(table) - before
    return HandWritten(statistics.median(hot), max(hot), len(hot), written / merged)


def _make_table(spark: SparkSession, table: Path, rows: int, vectors: bool) -> None:
    """Write the rows of `workload.insert` with Spark, as users do."""
    frame = spark.range(1, rows + 1).selectExpr(
        "id",
        "cast(id % 1000 as int) k",
        "'value of the row ' || id v",
        "cast(id % 100000 / 100 as decimal(12,2)) amt",
        "timestamp_seconds(1704067200 + id) ts",
    )
    vectored = str(vectors).lower()
    frame.write.format("delta").option("delta.enableDeletionVectors", vectored).save(str(table))


@contextmanager
def _writing(folder: Path, rows: int) -> Iterator[None]:
    """Write a file of changes each second during the block."""
    stopping = threading.Event()
    thread = threading.Thread(target=_write, args=(folder, rows, stopping), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join()


def _write(folder: Path, rows: int, stopping: threading.Event) -> None:
    chance = random.Random(1)  # noqa: S311 - rows of a load
    started, number = time.monotonic(), 0
    while not stopping.wait(max(0.0, started + number - time.monotonic())):
        hidden = folder / f"_{number}.parquet"  # Spark ignores the file until it has its final name
        pq.write_table(_changes(chance.sample(range(1, rows + 1), _CHANGES_PER_S), number), hidden)
        hidden.rename(folder / f"{number}.parquet")
        number += 1


def _changes(ids: list[int], number: int) -> pa.Table:
    count = len(ids)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "k": pa.array([number] * count, pa.int32()),
            "v": [f"changed {row}" for row in ids],
            "amt": pa.array([Decimal(row % 100_000) / 100 for row in ids], pa.decimal128(12, 2)),
            "ts": pa.array([number * 1_000_000] * count, pa.timestamp("us", "UTC")),
            "lsn": pa.array(range(number * count, (number + 1) * count), pa.int64()),
        }
    )
