"""Reading tables as of any source transaction: a version of the lake table with later changes laid over it.

`as_of` and `read_as_of` give Spark data frames, `arrow_view_as_of` and `arrow_as_of` Arrow tables and need no
JVM. Several tables of one view show the same transactions.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import Points
from airflow_provider_pgrepl.replication.lake.time_travel.history import HistoryAt
from airflow_provider_pgrepl.replication.lake.time_travel.moment import Moment, find_moment
from airflow_provider_pgrepl.replication.lake.time_travel.plan import Planner, TablePlan
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import check_delta

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def as_of(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> SparkAsOf:
    """The pipeline's tables as of one moment, as Spark data frames; without an LSN or a time the newest one
    that is durable in the changelog, whether or not it has been applied.

    Raises ToolError when the session has no Delta, ConfigError for arguments that cannot be meant, LakeError
    for a moment that is not known yet or not kept any more.
    """
    check_delta(spark)
    return SparkAsOf(*_find(pipeline, lsn, timestamp, epoch), spark)


def read_as_of(
    spark: SparkSession,
    pipeline: Pipeline,
    table: str,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> DataFrame:
    """One table as of a moment. Several tables of the same moment: `as_of`. Raises what these raise."""
    return as_of(spark, pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).table(table)


def arrow_view_as_of(
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> ArrowAsOf:
    """The same as `as_of`, as Arrow tables and without a JVM."""
    return ArrowAsOf(*_find(pipeline, lsn, timestamp, epoch))


def arrow_as_of(
    pipeline: Pipeline,
    table: str,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> pa.Table:
    """One table as of a moment. Several tables of the same moment: `arrow_view_as_of`."""
    return arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).table(table)


def verified(
    pipeline: Pipeline,
    table: str,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> bool:
    """Whether all DDL up to a moment is known to show in the table as of it.

    It is not where the table was altered later, or before, at a place that the stream does not tell. What has
    not been found yet cannot be said: later the answer may be another. Raises what `read_as_of` does.
    """
    return arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).verified(table)


def _find(
    pipeline: Pipeline, lsn: int | str | None, timestamp: datetime | None, epoch: int | None
) -> tuple[Moment, Planner]:
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            "pipeline: reading as of a moment needs the pipeline, whose choices the rows follow",
            "pass Pipeline.read('pipeline.json')",
        )
    points = Points(pipeline.lake_root)
    moment = find_moment(pipeline.lake_root, points, lsn, timestamp, epoch)
    return moment, Planner(pipeline, moment, points)


@dataclass(frozen=True)
class _AsOf:
    moment: Moment
    planner: Planner

    @property
    def lsn(self) -> LSN:
        """All that committed at or before it is shown, and nothing later. The same again: pass this."""
        return self.moment.lsn

    @property
    def epoch(self) -> Epoch:
        """The epoch to which the LSN belongs."""
        return self.moment.epoch

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that were replicated at the nearest consistent point, in order."""
        return self.planner.tables

    def relation(self, table: str) -> Relation:
        """What the source's table was at the moment: columns, types, key. Raises what `table` does."""
        return self.planner.relation(_parse(table))

    def verified(self, table: str) -> bool:
        """Whether all DDL up to the moment is known to show in the table. Raises what `table` does."""
        return self.planner.plan(_parse(table)).unverified is None

    def _plan(self, table: str) -> TablePlan:
        plan = self.planner.plan(_parse(table))
        if plan.unverified is not None:
            warnings.warn(str(plan.unverified), UnverifiedWarning, stacklevel=4)
        return plan

    def _history(self, plan: TablePlan) -> HistoryAt:
        return HistoryAt.find(self.planner.lake_root, plan.table, plan.schema, self.epoch, plan.lsn)


def _parse(table: str) -> TableName:
    try:
        return TableName.parse(table)
    except ValueError as error:
        raise LakeError(str(error)) from None


@dataclass(frozen=True)
class ArrowAsOf(_AsOf):
    """Tables as of one moment, without a JVM."""

    def table(self, name: str) -> pa.Table:
        """The whole table. Raises LakeError, DriftError, ValueRangeError; never shows another moment. Warns
        with UnverifiedWarning."""
        return self._plan(name).rows()

    def history(self, name: str) -> pa.Table:
        """Every version that a row had up to the moment, with its lifetime; the end of those valid then is
        null. Raises LakeError also when the table keeps no history."""
        plan = self._plan(name)
        return self._history(plan).arrow(plan.rows(), plan)


@dataclass(frozen=True)
class SparkAsOf(_AsOf):
    """Tables as of one moment, for Spark."""

    spark: SparkSession

    def table(self, name: str) -> DataFrame:
        """The table, read when it is used and on the executors only.

        Raises LakeError and DriftError; what is wrong with single values comes up when it is used. Warns with
        UnverifiedWarning.
        """
        return self._frame(self._plan(name))

    def history(self, name: str) -> DataFrame:
        """Every version that a row had up to the moment, with its lifetime; the end of those valid then is
        null. Raises LakeError also when the table keeps no history."""
        plan = self._plan(name)
        return self._history(plan).frame(self.spark, self._frame(plan), plan)

    def _frame(self, plan: TablePlan) -> DataFrame:
        from airflow_provider_pgrepl.replication.lake.time_travel.spark_overlay import frame_of

        return frame_of(plan, self.spark)
