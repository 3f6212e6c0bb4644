"""A plan carried out by Spark: changes are read and collapsed in a task, and joined to the version."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import Schema

from airflow_provider_pgrepl.replication.lake.history.table import aligned
from airflow_provider_pgrepl.replication.lake.time_travel.closed_versions import ended_since, evolved_closed
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import Overlay
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.lake.time_travel.spark_net_rows import SparkNetRows
from airflow_provider_pgrepl.replication.lake.time_travel.spark_replaced import SparkReplaced
from airflow_provider_pgrepl.replication.lake.time_travel.spark_task import Batches, one_task, quoted, told
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.settings.store_variables import reaching_store

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


def frame_of(plan: TablePlan, spark: SparkSession) -> DataFrame:
    """The table as of the plan's moment; nothing is read before it is used.

    A row that the changes need and the version lacks is an error when it is used. Raises LakeError.
    """
    frame = plan.version.frame(spark)
    for overlay in plan.overlays:
        frame = _lay_over(frame, overlay)
    return frame.select(*map(quoted, plan.schema.names))


def _lay_over(version: DataFrame, overlay: Overlay) -> DataFrame:
    if overlay.fits(version.columns):
        version = version.select(*map(quoted, overlay.schema.names))
    else:
        version = version.mapInArrow(reaching_store(_each(overlay.evolved)), spark_schema(overlay.schema))
    if not overlay.count:
        return version
    if overlay.key_names:
        return SparkReplaced(version, overlay).result()
    return SparkNetRows(version, overlay).result()


def _each(change: Callable[[pa.Table], pa.Table]) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            yield from told(partial(change, pa.Table.from_batches([batch]))).combine_chunks().to_batches()

    return run


def spark_schema(schema: pa.Schema) -> StructType:
    """The same columns for Spark, as it reads them from a Delta table."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(Schema.from_arrow(schema).to_json()))


def ended_frame(plan: TablePlan, schema: pa.Schema, epoch: Epoch, spark: SparkSession) -> DataFrame:
    """The versions of rows that the plan's changes end, in one task; `schema`: the history's columns."""
    return one_task(spark, spark_schema(schema), lambda: ended_since(plan, schema, epoch))


def evolved_frame(closed: DataFrame, plan: TablePlan, schema: pa.Schema) -> DataFrame:
    """Versions that ended before the plan's changes, in the history's columns."""
    if not any(overlay.evolves for overlay in plan.overlays):
        return closed
    change = _each(lambda rows: aligned(evolved_closed(rows, plan.overlays), schema))
    return closed.mapInArrow(reaching_store(change), spark_schema(schema))


def aligned_frame(frame: DataFrame, schema: pa.Schema) -> DataFrame:
    """In these columns; one that the frame has not is null."""
    from pyspark.sql import functions as sql

    return frame.select(
        *(
            (sql.col(quoted(field.name)) if field.name in frame.columns else sql.lit(None))
            .cast(field.dataType)
            .alias(field.name)
            for field in spark_schema(schema).fields
        )
    )
