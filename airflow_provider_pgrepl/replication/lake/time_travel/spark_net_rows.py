"""Changes of a table without key, laid over a version of it by Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows
from airflow_provider_pgrepl.replication.lake.time_travel.entries import MISSING
from airflow_provider_pgrepl.replication.lake.time_travel.overlay import Overlay
from airflow_provider_pgrepl.replication.lake.time_travel.spark_task import Batches, one_task, quoted, told
from airflow_provider_pgrepl.replication.settings.store_variables import reaching_store
from airflow_provider_pgrepl.replication.values import COMMIT_LSN

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WHICH, _TIMES, _RANK = "_pgrepl_which", "_pgrepl_times", "_pgrepl_rank"


class SparkNetRows:
    """A table without key: its rows are compared by value in Arrow, as everywhere, and counted by Spark."""

    def __init__(self, version: DataFrame, overlay: Overlay) -> None:
        from pyspark.sql import functions

        self.sql = functions
        self.version = version
        self.overlay = overlay

    def result(self) -> DataFrame:
        overlay, names = self.overlay, self.version.columns
        gained = one_task(
            self.version.sparkSession, self.version.schema, lambda: overlay.net_rows().gained.select(names)
        )
        compared = self._compared()
        return self._remaining(compared).unionByName(gained).unionByName(self._lacking(compared))

    def _compared(self) -> DataFrame:
        """The version's rows, each with the number of the lost row that it equals, and how many go."""
        from pyspark.sql.types import LongType, StructField, StructType

        counted = [StructField(_WHICH, LongType()), StructField(_TIMES, LongType())]
        schema = StructType([*self.version.schema.fields, *counted])
        return self.version.mapInArrow(reaching_store(_comparing(self.overlay)), schema)

    def _remaining(self, compared: DataFrame) -> DataFrame:
        from pyspark.sql.window import Window

        sql, names = self.sql, [quoted(name) for name in self.version.columns]
        newest = sql.col(COMMIT_LSN).desc() if COMMIT_LSN in self.version.columns else sql.lit(0)
        rank = sql.row_number().over(Window.partitionBy(_WHICH).orderBy(newest))
        ranked = compared.where(f"{_WHICH} >= 0").withColumn(_RANK, rank)
        staying = compared.where(f"{_WHICH} < 0").select(*names)
        return staying.unionByName(ranked.where(f"{_RANK} > {_TIMES}").select(*names))

    def _lacking(self, compared: DataFrame) -> DataFrame:
        """No row, but an error if the version holds a lost row less often than it goes."""
        from pyspark.sql.types import LongType, StructField, StructType

        sql, overlay = self.sql, self.overlay
        schema = StructType([StructField("lost", LongType()), StructField("often", LongType())])
        lost = one_task(self.version.sparkSession, schema, lambda: _numbered(overlay.net_rows()))
        there = compared.where(f"{_WHICH} >= 0").groupBy(_WHICH).count()
        lacks = sql.coalesce(sql.col("count"), sql.lit(0)) < sql.col("often")
        joined = lost.join(there, sql.col("lost") == sql.col(_WHICH), "left")
        error = sql.raise_error(sql.lit(MISSING)).cast("boolean")
        # In one expression: a condition that needs no row would be looked at before all others.
        return joined.where(sql.when(lacks, error).otherwise(sql.lit(False))).select(
            *(sql.lit(None).cast(field.dataType).alias(field.name) for field in self.version.schema.fields)
        )


def _numbered(net: NetRows) -> pa.Table:
    return pa.table({"lost": pa.array(range(len(net.lost)), pa.int64()), "often": pa.array(net.times)})


def _comparing(overlay: Overlay) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def compare(batches: Iterable[pa.RecordBatch]) -> Batches:
        net = told(overlay.net_rows)
        if net.overwrite:
            return
        times = np.append(net.times, 0)
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            which = match_rows(rows, net.lost)
            counted = rows.append_column(_WHICH, pa.array(which))
            yield from counted.append_column(_TIMES, pa.array(times[which])).combine_chunks().to_batches()

    return compare
