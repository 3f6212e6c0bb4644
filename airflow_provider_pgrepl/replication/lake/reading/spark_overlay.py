"""An overlay by Spark: changes are read and collapsed in a task, and joined to the version of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa

from airflow_provider_pgrepl.errors import LakeTableError, PgReplError
from airflow_provider_pgrepl.replication.lake.history.place import LIFETIME
from airflow_provider_pgrepl.replication.lake.merging.lake_rows import match_rows
from airflow_provider_pgrepl.replication.lake.merging.multiset import NetRows
from airflow_provider_pgrepl.replication.lake.reading.history import ended_since
from airflow_provider_pgrepl.replication.lake.reading.overlay import OverlayJob
from airflow_provider_pgrepl.replication.lake.reading.overlay_rows import (
    ALIVE,
    KIND,
    MARK,
    MISSING,
    MUST,
    ROW,
    follows_keys,
    kept,
    origin,
    replaced,
    value,
)
from airflow_provider_pgrepl.replication.lake.reading.table_plan import TablePlan
from airflow_provider_pgrepl.replication.lsn import Epoch
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

_SMALL = 200_000
"""Up to so many changed rows are sent to every executor instead of moving the table's rows to them."""

_WHICH, _TIMES, _RANK = "_pgrepl_which", "_pgrepl_times", "_pgrepl_rank"

Batches = Iterator[pa.RecordBatch]
Told = TypeVar("Told")


def lay_over(version: DataFrame, plan: TablePlan) -> DataFrame:
    """The version with the plan's changes; nothing is read before the result is used.

    A row that the changes need and the version lacks is an error when the result is used.
    """
    if plan.overlay is None:
        return version
    if not plan.overlay.key_names:
        return _NetRows(version, plan.overlay).result()
    return _Replaced(version, plan.overlay, plan).result()


def ended_frame(history: DataFrame, plan: TablePlan, epoch: Epoch) -> DataFrame | None:
    """The versions of rows that the plan's changes end, as `history` has them; None when there are none."""
    job = plan.overlay
    if job is None:
        return None
    known = {*job.schema.names, *LIFETIME.names}
    schema = _only(history.schema, known)
    return _one_task(history, schema, lambda: ended_since(job, plan.uri, plan.version, epoch))


def _only(schema: StructType, names: set[str]) -> StructType:
    from pyspark.sql.types import StructType

    return StructType([field for field in schema.fields if field.name in names])


class _Replaced:
    """A table with a key: the rows that changes replace are found by joins."""

    def __init__(self, version: DataFrame, job: OverlayJob, plan: TablePlan) -> None:
        from pyspark.sql import functions

        policy = job.pipeline.policy(plan.table)
        self.sql = functions
        self.version = version
        self.keys = job.key_names
        self.small = plan.changes <= _SMALL
        self.emptied = plan.truncated and policy.truncate == "apply" and policy.deletes == "hard"
        self.marked = plan.truncated and policy.truncate == "apply" and policy.deletes == "soft"
        self.is_own_origin = not follows_keys(policy)
        schema = _entry_schema(version.schema, self.keys)
        self.entries = _one_task(version, schema, lambda: job.replaced_rows().entries)

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
        """Rows of the version that no entry replaces."""
        keys = self._rows().select(*(self.sql.col(replaced(n)) for n in range(len(self.keys))))
        same = self._all((self.version[quoted(key)], keys[replaced(n)]) for n, key in enumerate(self.keys))
        return self.version.join(self._hinted(keys), same, "left_anti")

    def _marked(self, remaining: DataFrame) -> DataFrame:
        """The same, softly deleted; rows that were so before stay as they are."""
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
        """The rows that come, with what stays of those that go; an error for one that is missing."""
        sql, numbers = self.sql, range(len(self.version.columns))
        joined = self._with_touched(self._rows(), replaced, "b")
        before, known = "b", "b_there"
        if not self.is_own_origin:
            joined = self._with_touched(joined, origin, "k")
            before, known = "k", "k_there"
        keeps = sql.greatest(sql.lit(False), *(sql.col(kept(n)) for n in numbers)) & sql.col(ALIVE)
        lacks = (sql.col(MUST) & sql.col("b_there").isNull()) | (keeps & sql.col(known).isNull())
        error = sql.raise_error(sql.lit(MISSING)).cast("boolean")
        checked = joined.where(sql.when(lacks, error).otherwise(sql.col(ALIVE)))
        return checked.select(
            *(
                sql.when(sql.col(kept(n)), sql.col(f"{before}{n}")).otherwise(sql.col(value(n))).alias(name)
                for n, name in enumerate(self.version.columns)
            )
        )

    def _with_touched(self, entries: DataFrame, name: Callable[[int], str], prefix: str) -> DataFrame:
        """Entries beside the version's rows of that key: columns as prefix and number, and whether they are.

        Such rows are few, so they are picked out before the join.
        """
        sql, numbers = self.sql, range(len(self.keys))
        keys = self._rows().select(*(sql.col(name(n)).alias(f"w{n}") for n in numbers))
        version = self.version.limit(0) if self.emptied else self.version
        same = self._all((version[quoted(key)], keys[f"w{n}"]) for n, key in enumerate(self.keys))
        touched = version.join(self._hinted(keys), same, "left_semi").select(
            *(sql.col(quoted(column)).alias(f"{prefix}{n}") for n, column in enumerate(version.columns)),
            sql.lit(True).alias(f"{prefix}_there"),
        )
        places = [self.version.columns.index(key) for key in self.keys]
        pairs = ((sql.col(name(n)), sql.col(f"{prefix}{place}")) for n, place in enumerate(places))
        return entries.join(touched, self._all(pairs), "left")

    def _all(self, pairs: Iterable[tuple[Column, Column]]) -> Column:
        result = self.sql.lit(True)
        for one, other in pairs:
            result = result & (one == other)
        return result


def quoted(name: str) -> str:
    """A column's name as Spark wants it, whatever characters are in it."""
    return "`" + name.replace("`", "``") + "`"


class _NetRows:
    """A table without key: its rows are compared by value in Arrow, as everywhere, and counted by Spark."""

    def __init__(self, version: DataFrame, job: OverlayJob) -> None:
        from pyspark.sql import functions

        self.sql = functions
        self.version = version
        self.job = job

    def result(self) -> DataFrame:
        job, names = self.job, self.version.columns
        gained = _one_task(self.version, self.version.schema, lambda: job.net_rows().gained.select(names))
        compared = self._compared()
        return self._remaining(compared).unionByName(gained).unionByName(self._lacking(compared))

    def _compared(self) -> DataFrame:
        """The version's rows, each with the number of the lost row that it equals, and how many go."""
        from pyspark.sql.types import LongType, StructField, StructType

        counted = [StructField(_WHICH, LongType()), StructField(_TIMES, LongType())]
        schema = StructType([*self.version.schema.fields, *counted])
        return self.version.mapInArrow(_comparing(self.job), schema)

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

        sql, job = self.sql, self.job
        schema = StructType([StructField("lost", LongType()), StructField("often", LongType())])
        lost = _one_task(self.version, schema, lambda: _numbered(job.net_rows()))
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


def _comparing(job: OverlayJob) -> Callable[[Iterable[pa.RecordBatch]], Batches]:
    def compare(batches: Iterable[pa.RecordBatch]) -> Batches:
        net = _told(job.net_rows)
        if net.overwrite:
            return
        times = np.append(net.times, 0)
        for batch in batches:
            rows = pa.Table.from_batches([batch])
            which = match_rows(rows, net.lost)
            counted = rows.append_column(_WHICH, pa.array(which))
            yield from counted.append_column(_TIMES, pa.array(times[which])).combine_chunks().to_batches()

    return compare


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


def _one_task(version: DataFrame, schema: StructType, work: Callable[[], pa.Table]) -> DataFrame:
    """What one task works out, as a data frame of this schema."""
    names = schema.names

    def run(batches: Iterable[pa.RecordBatch]) -> Batches:
        for batch in batches:
            if batch.num_rows:
                rows = _told(work)
                if rows.num_rows:
                    yield from rows.select(names).combine_chunks().to_batches()

    return version.sparkSession.range(0, 1, 1, 1).mapInArrow(run, schema)


def _told(work: Callable[[], Told]) -> Told:
    """Our own errors pass; of others, whose text may hold values of rows, only their kind."""
    failed = ""
    try:
        return work()
    except PgReplError:
        raise
    except Exception as error:
        failed = type(error).__name__
    raise LakeTableError(f"the changes cannot be laid over the lake table: {failed}")
