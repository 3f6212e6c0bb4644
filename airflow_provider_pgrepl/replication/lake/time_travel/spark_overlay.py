"""Applies changes to a version of a lake table in Spark. Rows of a table with a key are found by joins."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
from deltalake import Schema

from airflow_provider_pgrepl.errors import LakeTableError, PgReplError
from airflow_provider_pgrepl.replication.lake.files.row_equality import match_rows
from airflow_provider_pgrepl.replication.lake.history.table import aligned
from airflow_provider_pgrepl.replication.lake.merge.keyless import NetRows
from airflow_provider_pgrepl.replication.postgres.lsn import Epoch
from airflow_provider_pgrepl.replication.settings.store_variables import reaching_store
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED
from airflow_provider_pgrepl.trace import log_unexpected, traced

from .overlay import ALIVE, KIND, MARK, MISSING, MUST, ROW, Overlay, kept, origin, replaced, value
from .plan import TablePlan, ended_since, evolved_closed

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType


log = logging.getLogger(__name__)

Batches = Iterator[pa.RecordBatch]
Value = TypeVar("Value")
_WHICH, _TIMES, _RANK = "_pgrepl_which", "_pgrepl_times", "_pgrepl_rank"
_SMALL = 200_000
"""Maximum number of changed rows that are broadcast to every executor. With more changes, Spark may shuffle
the table's rows instead."""


def quoted(name: str) -> str:
    """Return a column name quoted for Spark, whatever characters it contains."""
    return "`" + name.replace("`", "``") + "`"


def one_task(spark: SparkSession, schema: StructType, work: Callable[[], pa.Table]) -> DataFrame:
    """Return a data frame of this schema with the rows that `work` returns. One Spark task runs `work`."""
    names = schema.names

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            if batch.num_rows:
                rows = hiding_values(work)
                if rows.num_rows:
                    yield from rows.select(names).combine_chunks().to_batches()

    return spark.range(0, 1, 1, 1).mapInArrow(reaching_store(run), schema)


def hiding_values(work: Callable[[], Value]) -> Value:
    """Return what `work` returns. This package's errors pass. Any other becomes a LakeTableError with only
    its class and frames, because its message may contain values of rows."""
    try:
        return work()
    except PgReplError:
        raise
    except Exception as error:  # noqa: BLE001 - only its kind leaves the task
        doing = "the changes cannot be applied on top of the lake table"
        log_unexpected(log, doing, error)
        failed = traced(LakeTableError(f"{doing}: {type(error).__name__}"), error)
    raise failed


class SparkNetRows:
    """Applies changes to a table without a key. Arrow compares its rows by value, and Spark counts them."""

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
        """Return the version's rows, each with the number of the lost row that it equals (-1: none), and how
        many copies of that row are removed."""
        from pyspark.sql.types import LongType, StructField, StructType

        counted = [StructField(_WHICH, LongType()), StructField(_TIMES, LongType())]
        schema = StructType([*self.version.schema.fields, *counted])
        return _mapped(self.version, _comparing(self.overlay), schema)

    def _remaining(self, compared: DataFrame) -> DataFrame:
        from pyspark.sql.window import Window

        sql, names = self.sql, [quoted(name) for name in self.version.columns]
        newest = sql.col(COMMIT_LSN).desc() if COMMIT_LSN in self.version.columns else sql.lit(0)
        rank = sql.row_number().over(Window.partitionBy(_WHICH).orderBy(newest))
        ranked = compared.where(f"{_WHICH} >= 0").withColumn(_RANK, rank)
        staying = compared.where(f"{_WHICH} < 0").select(*names)
        return staying.unionByName(ranked.where(f"{_RANK} > {_TIMES}").select(*names))

    def _lacking(self, compared: DataFrame) -> DataFrame:
        """Return an empty frame that fails when it is used if the version has fewer copies of a lost row than
        are removed."""
        from pyspark.sql.types import LongType, StructField, StructType

        sql, overlay = self.sql, self.overlay
        schema = StructType([StructField("lost", LongType()), StructField("often", LongType())])
        lost = one_task(self.version.sparkSession, schema, lambda: _numbered(overlay.net_rows()))
        there = compared.where(f"{_WHICH} >= 0").groupBy(_WHICH).count()
        lacks = sql.coalesce(sql.col("count"), sql.lit(0)) < sql.col("often")
        joined = lost.join(there, sql.col("lost") == sql.col(_WHICH), "left")
        error = sql.raise_error(sql.lit(MISSING)).cast("boolean")
        # Keep this one expression: Spark would evaluate a condition that uses no column before all others.
        return joined.where(sql.when(lacks, error).otherwise(sql.lit(False))).select(
            *(sql.lit(None).cast(field.dataType).alias(field.name) for field in self.version.schema.fields)
        )


def _numbered(net: NetRows) -> pa.Table:
    return pa.table({"lost": pa.array(range(len(net.lost)), pa.int64()), "often": pa.array(net.times)})


def _comparing(overlay: Overlay) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def compare(batches: Iterable[pa.RecordBatch]) -> Batches:
        net = hiding_values(overlay.net_rows)
        if net.overwrite:
            return
        times = np.append(net.times, 0)
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            which = match_rows(rows, net.lost)
            counted = rows.append_column(_WHICH, pa.array(which))
            yield from counted.append_column(_TIMES, pa.array(times[which])).combine_chunks().to_batches()

    return compare


class SparkReplaced:
    """Applies changes to a table with a key. Joins find the rows that the changes replace."""

    def __init__(self, version: DataFrame, overlay: Overlay) -> None:
        from pyspark.sql import functions

        policy = overlay.options.policy
        emptied = overlay.truncated and policy.truncate == "apply"
        self.sql = functions
        self.version = version
        self.keys = overlay.key_names
        self.small = overlay.count <= _SMALL
        self.emptied = emptied and policy.deletes == "hard"
        self.marked = emptied and policy.deletes == "soft"
        self.is_own_origin = not policy.follows_keys
        schema = _entry_schema(version.schema, self.keys)
        self.entries = one_task(version.sparkSession, schema, overlay.entries)

    def result(self) -> DataFrame:
        if self.emptied:
            return self._coming()
        remaining = self._remaining()
        return (self._marked(remaining) if self.marked else remaining).unionByName(self._coming())

    def _rows(self) -> DataFrame:
        return self.entries.where(self.sql.col(KIND) == ROW)

    def _hinted(self, frame: DataFrame) -> DataFrame:
        return self.sql.broadcast(frame) if self.small else frame

    def _remaining(self) -> DataFrame:
        """Return the rows of the version that no entry replaces."""
        keys = self._rows().select(*(self.sql.col(replaced(n)) for n in range(len(self.keys))))
        same = self._all((self.version[quoted(key)], keys[replaced(n)]) for n, key in enumerate(self.keys))
        return self.version.join(self._hinted(keys), same, "left_anti")

    def _marked(self, remaining: DataFrame) -> DataFrame:
        """Return the remaining rows as soft-deleted. Rows that already were keep their values."""
        stamps = {name: f"new_{name}" for name in (COMMIT_LSN, COMMIT_TS) if name in self.version.columns}
        marks = self.entries.where(self.sql.col(KIND) == MARK).select(
            *(
                self.sql.col(value(self.version.columns.index(name))).alias(alias)
                for name, alias in stamps.items()
            ),
            self.sql.lit(True).alias("new_mark"),
        )
        live = ~self.sql.col(DELETED)
        changed = remaining.crossJoin(self.sql.broadcast(marks))
        columns = {name: self.sql.col(quoted(name)) for name in self.version.columns}
        for name, alias in stamps.items():
            columns[name] = self.sql.when(live, self.sql.col(alias)).otherwise(columns[name])
        columns[DELETED] = self.sql.lit(True)
        return changed.select(*(column.alias(name) for name, column in columns.items()))

    def _coming(self) -> DataFrame:
        """Return the new rows, with the values that stay from their origin rows. Fails when used if an origin
        or a row to replace is missing, or is there twice."""
        sql, numbers = self.sql, range(len(self.version.columns))
        joined = self._with_touched(self._rows(), replaced, "b")
        before = "b"
        if not self.is_own_origin:
            joined = self._with_touched(joined, origin, "k")
            before = "k"
        replaced_times, kept_times = sql.col("b_times"), sql.col(f"{before}_times")
        keeps = sql.greatest(sql.lit(False), *(sql.col(kept(n)) for n in numbers)) & sql.col(ALIVE)
        lacks = (sql.col(MUST) & replaced_times.isNull()) | (keeps & kept_times.isNull())
        doubles = (replaced_times > 1) | (kept_times > 1)
        error = sql.raise_error(sql.lit(MISSING)).cast("boolean")
        checked = joined.where(sql.when(lacks | doubles, error).otherwise(sql.col(ALIVE)))
        return checked.select(
            *(
                sql.when(sql.col(kept(n)), sql.col(f"{before}{n}")).otherwise(sql.col(value(n))).alias(name)
                for n, name in enumerate(self.version.columns)
            )
        )

    def _with_touched(self, entries: DataFrame, name: Callable[[int], str], prefix: str) -> DataFrame:
        """Return the entries joined with the version's rows that have the key in `name`, as columns of prefix
        and number, and the column `<prefix>_times`: how many rows have the key, null for none.

        These rows are few, so they are selected before the join.
        """
        from pyspark.sql.window import Window

        sql, numbers = self.sql, range(len(self.keys))
        keys = self._rows().select(*(sql.col(name(n)).alias(f"w{n}") for n in numbers))
        version = self.version.limit(0) if self.emptied else self.version
        same = self._all((version[quoted(key)], keys[f"w{n}"]) for n, key in enumerate(self.keys))
        touched = version.join(self._hinted(keys), same, "left_semi").select(
            *(sql.col(quoted(column)).alias(f"{prefix}{n}") for n, column in enumerate(version.columns)),
            sql.count(sql.lit(1)).over(Window.partitionBy(*map(quoted, self.keys))).alias(f"{prefix}_times"),
        )
        places = [self.version.columns.index(key) for key in self.keys]
        pairs = ((sql.col(name(n)), sql.col(f"{prefix}{place}")) for n, place in enumerate(places))
        return entries.join(touched, self._all(pairs), "left")

    def _all(self, pairs: Iterable[tuple[Column, Column]]) -> Column:
        result = self.sql.lit(True)
        for one, other in pairs:
            result = result & (one == other)
        return result


def _entry_schema(version: StructType, keys: list[str]) -> StructType:
    from pyspark.sql.types import BooleanType, LongType, StructField, StructType

    types = {field.name: field.dataType for field in version.fields}
    fields = [
        StructField(KIND, LongType()),
        StructField(ALIVE, BooleanType()),
        StructField(MUST, BooleanType()),
        *(StructField(replaced(number), types[key]) for number, key in enumerate(keys)),
        *(StructField(origin(number), types[key]) for number, key in enumerate(keys)),
    ]
    for number, field in enumerate(version.fields):
        fields += [StructField(value(number), field.dataType), StructField(kept(number), BooleanType())]
    return StructType(fields)


def frame_of(plan: TablePlan, spark: SparkSession) -> DataFrame:
    """Return the table as of the plan's point in time. Rows are read when the frame is used.

    Using it fails if the version lacks a row that the changes need. Raises LakeError.
    """
    frame = plan.version.frame(spark)
    for overlay in plan.overlays:
        frame = _lay_over(frame, overlay)
    return frame.select(*map(quoted, plan.schema.names))


def _lay_over(version: DataFrame, overlay: Overlay) -> DataFrame:
    if overlay.evolves:
        version = _mapped(version, _each(overlay.evolved), spark_schema(overlay.schema))
    else:
        version = version.select(*map(quoted, overlay.schema.names))
    if not overlay.count:
        return version
    if overlay.key_names:
        return SparkReplaced(version, overlay).result()
    return SparkNetRows(version, overlay).result()


def _mapped(
    frame: DataFrame, change: Callable[[Iterable[pa.RecordBatch]], Batches], schema: StructType
) -> DataFrame:
    """Return a data frame of this schema with the rows that `change` makes of those of `frame`.

    pyspark looks up the columns of a frame by their names without quotes, so it does not find `item.no`.
    `change` gets the names, and Spark only numbers.
    """
    names = frame.columns

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        return change(batch.rename_columns(names) for batch in batches)

    numbered = frame.toDF(*(f"c{number}" for number in range(len(names))))
    return numbered.mapInArrow(reaching_store(run), schema)


def _each(change: Callable[[pa.Table], pa.Table]) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            yield from (
                hiding_values(partial(change, pa.Table.from_batches([batch]))).combine_chunks().to_batches()
            )

    return run


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the schema that Spark has for a Delta table with these columns."""
    from pyspark.sql.types import StructType

    return StructType.fromJson(json.loads(Schema.from_arrow(schema).to_json()))


def ended_frame(plan: TablePlan, schema: pa.Schema, epoch: Epoch, spark: SparkSession) -> DataFrame:
    """Return the row versions that the plan's changes end, computed by one task. `schema`: the columns of the
    history."""
    return one_task(spark, spark_schema(schema), lambda: ended_since(plan, schema, epoch))


def evolved_frame(closed: DataFrame, plan: TablePlan, schema: pa.Schema) -> DataFrame:
    """Return row versions that ended before the plan's changes, in the columns of the history."""
    if not any(overlay.evolves for overlay in plan.overlays):
        return closed
    change = _each(lambda rows: aligned(evolved_closed(rows, plan.overlays), schema))
    return _mapped(closed, change, spark_schema(schema))


def aligned_frame(frame: DataFrame, schema: pa.Schema) -> DataFrame:
    """Return the frame with exactly these columns. A column that it lacks is null."""
    from pyspark.sql import functions as sql

    return frame.select(
        *(
            (sql.col(quoted(field.name)) if field.name in frame.columns else sql.lit(None))
            .cast(field.dataType)
            .alias(field.name)
            for field in spark_schema(schema).fields
        )
    )
