"""The rate of a verification of a large table. The peer is this package's snapshot of the same table."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.verification import Verification
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.receiver.changelog_feed import KeepaliveRule
from airflow_provider_pgrepl.replication.receiver.receiver import Receiver
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.spark.session import LazySession
from benchmarks import pipelines, snapshot
from benchmarks.figure import Figure, compare

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from airflow_provider_pgrepl.replication.changelog.layout import EpochRecord
    from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
    from airflow_provider_pgrepl.replication.state.database import StateDatabase

_TABLE = "public.wide"
_REPEAT = 3
_LIMIT = 1.0
_EAGER = KeepaliveRule(min_interval_s=0.1, min_bytes=1, max_wait_s=0.1, idle_wait_s=0.1)
"""Without traffic the changelog would reach the source's snapshot only minutes later."""


def run(folder: Path, scale: float) -> Figure:
    """Measure snapshots and verifications in turns."""
    rows = int(snapshot.ROWS * scale)
    ours, peers = [], []
    with snapshot.prepared(folder, rows) as (spark, source, state_db):
        pipeline = pipelines.make_pipeline(folder, "verified", _TABLE)
        pipelines.publish(source.dsn, pipeline)
        record = pipelines.take_snapshot(spark, source.dsn, pipeline, state_db)
        receiver = Receiver(source.dsn, pipeline, _EAGER)
        receiver.start()
        try:
            _verify(
                spark, source.dsn, pipeline, state_db, record
            )  # not measured: Spark's workers load modules
            for number in range(1, _REPEAT + 1):
                peers.append(rows / snapshot.copy(spark, source, state_db, folder, str(number)))
                ours.append(rows / _verify(spark, source.dsn, pipeline, state_db, record))
        finally:
            receiver.stop()
    work = f"verify: {rows / 1e6:g} M rows × 8 mixed columns, local[2]"
    return compare(work, ours, peers, _LIMIT, "rows/s", "this package's snapshot")


def _verify(
    spark: SparkSession, dsn: str, pipeline: Pipeline, state_db: StateDatabase, record: EpochRecord
) -> float:
    started = time.perf_counter()
    with closing(connect(dsn, "benchmark")) as source:
        session, records = LazySession(lambda: spark), state_db.read_tables(pipeline.name)
        access = Access(pipeline, dsn, dsn)
        run = Verification(
            access, source, state_db, record, records, session, timeout_s=600, shows_keys=False
        )
        report = run.run([TableName.parse(_TABLE)])
    if any(table.status != "equal" for table in report.tables.values()):
        raise RuntimeError(report.to_text())
    return time.perf_counter() - started
