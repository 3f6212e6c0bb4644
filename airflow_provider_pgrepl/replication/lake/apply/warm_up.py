"""Have Python workers load what merging needs, before the first changes wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl.replication.changelog.layout import ROW_SCHEMA
from airflow_provider_pgrepl.replication.lake.merge.collapse import collapse
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.runtime.compiled_loops import ensure_compiled

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def warm_up(spark: SparkSession) -> None:
    """Have each Python worker that merges may use merge a row; one slot is the streaming query's own.

    The loops are compiled first, so that Spark's daemon of workers finds them.
    """
    ensure_compiled()
    tasks = max(1, spark.sparkContext.defaultParallelism - 1)
    spark.sparkContext.parallelize(range(tasks), tasks).foreach(lambda _number: merge_a_row())


def merge_a_row() -> None:
    """Load in this process what merging needs."""
    relation = Relation(0, TableName("none", "none"), (Column("key", 1, 23, -1, "integer", is_key=True),))
    change = {"commit_lsn": 1, "ordinal": 0, "relation_id": 0, "op": "I", "new": ["1"]}
    collapse(pa.Table.from_pylist([change], schema=ROW_SCHEMA), relation)
