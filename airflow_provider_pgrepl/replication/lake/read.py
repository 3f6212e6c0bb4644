"""Reading of the lake at a consistent point or as of any source transaction.

At a consistent point, each table is read at the version that the point names, never at its newest version.
`consistent_read` returns Spark data frames; `consistent_arrow` returns Arrow tables and runs SQL without a
JVM. The functions that read as of a transaction can also be imported from here.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from airflow_provider_pgrepl.errors import ChangelogError, LakeError, NoChangelogError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history.table import is_history
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import (
    ArrowAsOf,
    HistoryAsOf,
    SparkAsOf,
    arrow_as_of,
    arrow_view_as_of,
    as_of,
    create_views,
    read_as_of,
    verified,
)
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion, parse_lsn
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import check_delta

from .consistent_points import ConsistentPoint, ConsistentPoints
from .sql import sql_reader

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "ArrowAsOf",
    "ArrowView",
    "ConsistentView",
    "SparkAsOf",
    "UnverifiedWarning",
    "arrow_as_of",
    "arrow_view_as_of",
    "as_of",
    "consistent_arrow",
    "consistent_read",
    "create_views",
    "read_as_of",
    "verified",
]


def consistent_read(
    spark: SparkSession,
    pipeline: Pipeline | str | Path,
    lsn: int | str | None = None,
    epoch: int | None = None,
) -> ConsistentView:
    """Return a view of all tables at one consistent point, as Spark data frames.

    The point is the newest one, or the newest at or before `lsn` in `epoch` (default: the newest epoch).
    `pipeline`: a pipeline, or its lake root. Raises ToolError if the session has no Delta, LakeError if there
    is no such point.
    """
    check_delta(spark)
    return consistent_arrow(pipeline, lsn, epoch).for_spark(spark)


def consistent_arrow(
    pipeline: Pipeline | str | Path, lsn: int | str | None = None, epoch: int | None = None
) -> ArrowView:
    """Return the same view as `consistent_read`, as Arrow tables and without a JVM. Raises LakeError."""
    root = _root(pipeline)
    return ArrowView(_point(root, lsn, epoch), root)


def _root(pipeline: Pipeline | str | Path) -> str:
    return pipeline.lake_root if isinstance(pipeline, Pipeline) else str(pipeline)


@dataclass(frozen=True)
class _View:
    point: ConsistentPoint
    lake_root: str

    @property
    def lsn(self) -> LSN:
        """The position of the view, which shows exactly the transactions that committed at or before it."""
        return LSN(self.point.lsn)

    @property
    def epoch(self) -> Epoch:
        """The epoch to which the LSN belongs."""
        return Epoch(self.point.epoch)

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that the point names, in alphabetical order."""
        return tuple(sorted(key for key in self.point.tables if not is_history(key)))

    def _history(self, table: str) -> HistoryAsOf:
        pinned = self._pinned(table)
        current = pa.schema(pinned.open().schema().to_arrow())
        return HistoryAsOf.find(self.lake_root, pinned.name, current, self.epoch, self.lsn)

    def _parsed(self, table: str) -> TableName:
        try:
            return TableName.parse(table)
        except ValueError as error:
            raise LakeError(str(error)) from None

    def _pinned(self, table: str) -> TableVersion:
        """Return the version of a table that the point names. Raises LakeError if it names none."""
        name = self._parsed(table)
        version = self.point.tables.get(str(name))
        if version is None:
            raise LakeError(
                f"the consistent point at {self.lsn} does not hold {name}",
                "it is being copied, errored, or not replicated; `pgrepl status`"
                f" says which. The point holds: {', '.join(self.tables)}",
            )
        seen = self.point.positions.get(str(name))
        app = None if seen is None else _app(self.lake_root, self.point.epoch)
        return TableVersion(name, f"{self.lake_root}/{name.path}", version, app, seen)


@dataclass(frozen=True)
class ConsistentView(_View):
    """The lake at one consistent point, for Spark."""

    spark: SparkSession

    def table(self, name: str) -> DataFrame:
        """Return a table at the point. `name`: for example `public.orders` or `"My Schema"."My Table"`.

        Raises LakeError instead of reading another version.
        """
        return self._pinned(name).frame(self.spark)

    def history(self, name: str) -> DataFrame:
        """Return every version that each row had up to the point, with its lifetime.

        The end is null for versions that are valid at the point. Raises LakeError, also if the table keeps no
        history.
        """
        return self._history(name).frame(self.spark, self.table(name))


@dataclass(frozen=True)
class ArrowView(_View):
    """The lake at one consistent point, without a JVM."""

    def table(self, name: str) -> pa.Table:
        """Return the whole table at the point. Raises LakeError instead of reading another version."""
        return self._pinned(name).read()

    def history(self, name: str) -> pa.Table:
        """Return every version that each row had up to the point, with its lifetime.

        The end is null for versions that are valid at the point. Raises LakeError, also if the table keeps no
        history.
        """
        return self._history(name).arrow(self.table(name))

    def sql(self, query: str) -> pa.Table:
        """Return all rows of a query, which `sql_reader` runs."""
        with self.sql_reader(query) as rows:
            return rows.read_all()

    def sql_reader(self, sql: str) -> AbstractContextManager[pa.RecordBatchReader]:
        """Run a query in DataFusion's SQL over the tables, and yield a reader that reads its rows on demand.

        Tables are named as in `public.orders`. Raises ConfigError for a statement that is not a query or
        cannot be planned, LakeError if the query fails.
        """
        moment = f"the consistent point {self.lsn}"
        return sql_reader(sql, self.tables, lambda table: self._pinned(table).open(), moment)

    def for_spark(self, spark: SparkSession) -> ConsistentView:
        """Return the view at the same point for Spark. Raises ToolError if the session has no Delta."""
        check_delta(spark)
        return ConsistentView(self.point, self.lake_root, spark)


def _app(lake_root: str, epoch: int) -> str | None:
    """Return the app ID whose version is a table's position; None if the pipeline's name cannot be read."""
    try:
        return app_id(read_epoch(changelog_uri(lake_root)).pipeline, Epoch(epoch))
    except ChangelogError:
        return None


def _check_is_lake(lake_root: str) -> None:
    try:
        read_epoch(changelog_uri(lake_root))
    except NoChangelogError:
        raise LakeError(
            f"there is no lake at {lake_root}", "give the pipeline's file, or the place that its lake names"
        ) from None


def _point(lake_root: str, lsn: int | str | None, epoch: int | None) -> ConsistentPoint:
    points = ConsistentPoints(lake_root)
    latest = points.latest()
    if latest is None:
        _check_is_lake(lake_root)
        raise LakeError(
            f"the lake {lake_root} has no consistent point yet",
            "the replication app writes the first one when the tables have caught up",
        )
    if lsn is None and epoch is None:
        return latest
    wanted = LSN(2**63 - 1) if lsn is None else parse_lsn(lsn)
    found = points.at_or_before(wanted, epoch)
    if found is None:
        in_epoch = f" in epoch {latest.epoch if epoch is None else epoch}"
        raise LakeError(
            f"no consistent point at or before {wanted} is kept{in_epoch}",
            "consistent_point_retention_h of the pipeline says how long they are",
        )
    return found
