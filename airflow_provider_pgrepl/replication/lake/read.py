"""Reading the lake: at a consistent point, or as of any source transaction.

At a consistent point each table is read at the version which the point names, never its newest:
`consistent_read` gives Spark data frames, `consistent_arrow` Arrow tables and SQL without a JVM. What reads
as of a transaction can be imported from here, too.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.errors import ChangelogError, LakeError
from airflow_provider_pgrepl.replication.changelog.layout import changelog_uri
from airflow_provider_pgrepl.replication.changelog.reader import read_epoch
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lake.delta.table import app_id
from airflow_provider_pgrepl.replication.lake.history.table import is_history
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import (
    ArrowAsOf,
    HistoryAt,
    SparkAsOf,
    arrow_as_of,
    arrow_view_as_of,
    as_of,
    read_as_of,
    verified,
)
from airflow_provider_pgrepl.replication.lake.time_travel.moment import TableVersion, parse_lsn
from airflow_provider_pgrepl.replication.lake.time_travel.verification import UnverifiedWarning
from airflow_provider_pgrepl.replication.lake.time_travel.views import create_views
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.spark.session import check_delta
from airflow_provider_pgrepl.trace import log_unexpected, traced

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

log = logging.getLogger(__name__)

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
    """All tables at the newest consistent point, or the newest at or before `lsn` (of `epoch`, else the
    newest one), as Spark data frames. `pipeline`: it, or just its lake root.

    Raises ToolError when the session has no Delta, LakeError when there is no such point.
    """
    check_delta(spark)
    root = _root(pipeline)
    return ConsistentView(_point(root, lsn, epoch), root, spark)


def consistent_arrow(
    pipeline: Pipeline | str | Path, lsn: int | str | None = None, epoch: int | None = None
) -> ArrowView:
    """The same as `consistent_read`, as Arrow tables and without a JVM. Raises LakeError."""
    root = _root(pipeline)
    return ArrowView(_point(root, lsn, epoch), root)


def _root(pipeline: Pipeline | str | Path) -> str:
    return pipeline.lake_root if isinstance(pipeline, Pipeline) else str(pipeline)


@dataclass(frozen=True)
class _View:
    point: ConsistentPoint
    lake_root: str

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that the point names, in order."""
        return tuple(sorted(key for key in self.point.tables if not is_history(key)))

    def _history(self, table: str) -> HistoryAt:
        pinned, epoch, lsn = self._pinned(table), Epoch(self.point.epoch), LSN(self.point.lsn)
        current = pa.schema(pinned.open().schema().to_arrow())
        return HistoryAt.find(self.lake_root, pinned.name, current, epoch, lsn)

    def _parsed(self, table: str) -> TableName:
        try:
            return TableName.parse(table)
        except ValueError as error:
            raise LakeError(str(error)) from None

    def _pinned(self, table: str) -> TableVersion:
        """The version of a table. Raises LakeError when the point does not name it."""
        name = self._parsed(table)
        version = self.point.tables.get(str(name))
        if version is None:
            raise LakeError(
                f"the consistent point at {LSN(self.point.lsn)} does not hold {name}",
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
        """A table, as `public.orders` or `"My Schema"."My Table"`. Raises LakeError, never reads another
        version."""
        return self._pinned(name).frame(self.spark)

    def history(self, name: str) -> DataFrame:
        """Every version that a row had up to the point, with its lifetime; the end of those valid then is
        null. Raises LakeError also when the table keeps no history."""
        return self._history(name).frame(self.spark, self.table(name))


@dataclass(frozen=True)
class ArrowView(_View):
    """The lake at one consistent point, without a JVM."""

    def table(self, name: str) -> pa.Table:
        """The whole table. Raises LakeError, never reads another version."""
        return self._pinned(name).read()

    def history(self, name: str) -> pa.Table:
        """Every version that a row had up to the point, with its lifetime; the end of those valid then is
        null. Raises LakeError also when the table keeps no history."""
        return self._history(name).arrow(self.table(name))

    def query(self, sql: str) -> pa.Table:
        """DataFusion SQL; a table is named as in `select count(*) from "public.orders"`, in double quotes.

        Raises LakeError for a table that the point does not name, and for SQL that cannot be run.
        """
        named = {table: quote_identifier(table) for table in self.tables}
        return self._run(
            sql, {quoted: self._pinned(key).open() for key, quoted in named.items() if quoted in sql}
        )

    def _run(self, sql: str, tables: dict[str, DeltaTable]) -> pa.Table:
        builder = QueryBuilder()
        for quoted, table in tables.items():
            builder.register(quoted, table)
        is_planned = False
        try:
            found = builder.execute(sql)
            is_planned = True
            return _plain(pa.table(found))
        except Exception as error:  # noqa: BLE001 - DataFusion raises plain ones
            # DataFusion raises plain Exception. What it says of data may hold values, so only its first words
            # about the statement go on; a chained error would carry the rest.
            doing = f"the query at the consistent point {LSN(self.point.lsn)} failed"
            said = type(error).__name__ if is_planned else str(error).partition("\n")[0]
            if is_planned:
                log_unexpected(log, doing, error)
            failed = traced(
                LakeError(
                    f"{doing}: {said}",
                    f"tables are written in double quotes; the point holds: {', '.join(self.tables)}",
                ),
                error,
            )
        raise failed


def _app(lake_root: str, epoch: int) -> str | None:
    """The app id under which tables say their position; None when the lake does not tell whose it is."""
    try:
        return app_id(read_epoch(changelog_uri(lake_root)).pipeline, Epoch(epoch))
    except ChangelogError:
        return None


def _point(lake_root: str, lsn: int | str | None, epoch: int | None) -> ConsistentPoint:
    points = Points(lake_root)
    latest = points.latest()
    if latest is None:
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
            "points_keep_h of the pipeline says how long they are",
        )
    return found


def _plain(table: pa.Table) -> pa.Table:
    """View types, DataFusion's own, as the types that everybody reads."""
    plain = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
    fields = [field.with_type(plain.get(field.type, field.type)) for field in table.schema]
    return table.cast(pa.schema(fields, metadata=table.schema.metadata))
