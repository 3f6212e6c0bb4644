"""Reads tables as of any source transaction: a version of the lake table with later changes applied to it.

`as_of` and `read_as_of` return Spark data frames, and `create_views` registers all tables of a pipeline as
views. `arrow_view_as_of` and `arrow_as_of` return Arrow tables and need no JVM. All tables of one view show
the same transactions.

A history contains all row versions as of a point in time: those that had ended, and those valid then, whose
end is null. Its columns are those that the history has now, and those that the table had at the point in
time. A version that ended before a column was added is null there.
"""

from __future__ import annotations

import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl import errors
from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoints
from airflow_provider_pgrepl.replication.lake.history.table import (
    FROM_EPOCH,
    FROM_LSN,
    FROM_TS,
    TO_EPOCH,
    TO_LSN,
    aligned,
    history_uri,
)
from airflow_provider_pgrepl.replication.lake.sql import sql_reader
from airflow_provider_pgrepl.replication.postgres import oids
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import ColumnName, TableName, show_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.settings.tables import PARTITION
from airflow_provider_pgrepl.replication.spark.session import check_delta
from airflow_provider_pgrepl.replication.storage.errors import raise_if_store_unavailable
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

from . import spark_overlay
from .moment import PointInTime, TableVersion, find_moment
from .plan import Planner, TablePlan, ended_since, evolved_closed
from .verification import UnverifiedWarning

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FROM = {FROM_LSN: COMMIT_LSN, FROM_TS: COMMIT_TS}
_UNQUOTED = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names of views that SQL needs not quote."""
_DEFAULT_SCHEMA = "public"
"""The schema whose views have no prefix."""


@dataclass(frozen=True)
class HistoryAsOf:
    """The history of a table up to a point in time. Rows are only appended to it, so that any later version
    of it can be used.

    `schema`: the columns of the result.
    """

    version: TableVersion
    schema: pa.Schema
    epoch: Epoch
    lsn: LSN

    @classmethod
    def find(
        cls, lake_root: str, table: TableName, current: pa.Schema, epoch: Epoch, lsn: LSN
    ) -> HistoryAsOf:
        """Return the history of a table. `current`: the table's columns at the point in time. Raises
        LakeError if the table has no history, if it began later with other columns, or cannot be opened."""
        uri = history_uri(lake_root, table)
        try:
            opened = open_delta(uri)
        except TableNotFoundError:
            raise LakeError(
                f"{table} keeps no history in the lake",
                f"set history: true, for the pipeline or under per_table, and {errors.resnapshot(table)}",
            ) from None
        except (DeltaError, OSError) as error:
            opening = f"the history of {table} in {uri} cannot be opened"
            raise_if_store_unavailable(opening, error)
            raise LakeError(
                f"{opening}: {type(error).__name__}",
                "check that the folder is complete and readable; the table itself is not affected",
            ) from None
        if not {COMMIT_LSN, COMMIT_TS} <= set(current.names):
            raise _began_later(table, "its lake table had no commit_lsn_column or commit_ts_column")
        schema = _united(table, pa.schema(opened.schema().to_arrow()), current)
        return cls(TableVersion(table, uri, int(opened.version())), schema, epoch, lsn)

    def arrow(self, current: pa.Table, plan: TablePlan | None = None) -> pa.Table:
        """Return all row versions: those that ended in the history, those that the plan's changes end, and
        the `current` rows."""
        sql = f"select * from it where {self._ended}"  # noqa: S608 - this package's names and numbers
        opened = self.version.open()
        held = pa.schema(opened.schema().to_arrow())
        closed = query_delta(opened, sql).cast(held)
        pieces = [_begun(current, self.epoch)]
        if plan is not None:
            closed = evolved_closed(closed, plan.overlays)
            pieces.append(ended_since(plan, self.schema, self.epoch))
        return pa.concat_tables([aligned(piece, self.schema) for piece in (closed, *pieces)])

    def frame(self, spark: SparkSession, current: DataFrame, plan: TablePlan | None = None) -> DataFrame:
        """Return what `arrow` does, as a Spark data frame."""
        from pyspark.sql import functions

        closed = self.version.frame(spark).where(self._ended)
        if DELETED in current.columns:
            current = current.where(f"not {DELETED}").drop(DELETED)
        names = {COMMIT_LSN: FROM_LSN, COMMIT_TS: FROM_TS}
        current = current.withColumnsRenamed(names).withColumn(FROM_EPOCH, functions.lit(int(self.epoch)))
        pieces = [spark_overlay.aligned_frame(current, self.schema)]
        if plan is not None and plan.overlays:
            closed = spark_overlay.evolved_frame(closed, plan, self.schema)
            pieces.append(spark_overlay.ended_frame(plan, self.schema, self.epoch, spark))
        every = spark_overlay.aligned_frame(closed, self.schema)
        for piece in pieces:
            every = every.unionByName(piece)
        return every

    @property
    def _ended(self) -> str:
        epoch, lsn = int(self.epoch), int(self.lsn)
        return f"{TO_EPOCH} < {epoch} or ({TO_EPOCH} = {epoch} and {TO_LSN} <= {lsn})"


def _began_later(table: TableName, why: str) -> LakeError:
    return LakeError(
        f"{table} kept no history then: {why}",
        "read its history as of an LSN after the resnapshot with which it began",
    )


def _united(table: TableName, history: pa.Schema, current: pa.Schema) -> pa.Schema:
    """Return the history's columns, and those that the table got since. If the types differ, the wider one is
    used. Raises LakeError if neither is."""
    own = {*_FROM.values(), DELETED, PARTITION}
    fields = {field.name: field for field in history}
    for field in current:
        if field.name not in own:
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _wider(table, known, field)
    return pa.schema(list(fields.values()))


def _wider(table: TableName, history: pa.Field, current: pa.Field) -> pa.Field:
    kinds = history.type, current.type
    if history.type == current.type:
        return history
    if _differ_in_size(*kinds):
        schemas = [pa.schema([field]) for field in (history, current)]
        wider = pa.unify_schemas(schemas, promote_options="permissive").field(0)
        if wider.type in kinds:
            return wider
    # A history is never rewritten, so that one with another type was begun with the table's next copy.
    raise _began_later(
        table,
        f"its history has column {show_identifier(history.name)} as {history.type}, and the table had it as"
        f" {current.type}",
    )


def _differ_in_size(one: pa.DataType, other: pa.DataType) -> bool:
    """Return True if a table that evolves can get one of these types in place of the other."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return _differ_in_size(one.value_type, other.value_type)
    kinds = (pa.types.is_integer, pa.types.is_floating, pa.types.is_decimal)
    return any(kind(one) and kind(other) for kind in kinds)


def _begun(current: pa.Table, epoch: Epoch) -> pa.Table:
    if DELETED in current.column_names:
        current = current.filter(pc.invert(current[DELETED])).drop_columns([DELETED])
    for name, own in _FROM.items():
        if own in current.column_names:
            at = current.schema.get_field_index(own)
            current = current.set_column(at, name, current[own])
    return current.append_column(FROM_EPOCH, pa.repeat(pa.scalar(int(epoch), pa.int64()), len(current)))


def as_of(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> SparkAsOf:
    """Return the pipeline's tables as of one point in time, as Spark data frames. Without an LSN or a
    timestamp, this is the newest durable LSN in the changelog, whether or not it has been applied.

    Raises ToolError if the session has no Delta, ConfigError for contradictory or invalid arguments, and
    LakeError for a point in time that is not known yet or no longer kept.
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
    """Return one table as of a point in time. Use `as_of` to read several tables at the same one. Raises what
    `as_of` and `SparkAsOf.table` raise."""
    return as_of(spark, pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).table(table)


def arrow_view_as_of(
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> ArrowAsOf:
    """Return what `as_of` does, as Arrow tables and without a JVM."""
    return ArrowAsOf(*_find(pipeline, lsn, timestamp, epoch))


def arrow_as_of(
    pipeline: Pipeline,
    table: str,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> pa.Table:
    """Return one table as of a point in time. Use `arrow_view_as_of` to read several tables at the same
    one."""
    return arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).table(table)


def verified(
    pipeline: Pipeline,
    table: str,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
) -> bool:
    """Return True if all DDL up to a point in time is known to be reflected in the table as of it.

    Returns False if the next announcement of the table after that point shows unsafe DDL whose position is
    not known: it may have come before. DDL that has not been detected yet is not considered, so that a later
    call may return False. Raises what `read_as_of` does.
    """
    return arrow_view_as_of(pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch).verified(table)


def _find(
    pipeline: Pipeline, lsn: int | str | None, timestamp: datetime | None, epoch: int | None
) -> tuple[PointInTime, Planner]:
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(
            "pipeline: reading as of a point in time needs the pipeline, whose settings determine the rows",
            "pass Pipeline.read('pipeline.json')",
        )
    points = ConsistentPoints(pipeline.lake_root)
    moment = find_moment(pipeline.lake_root, points, lsn, timestamp, epoch)
    return moment, Planner(pipeline, moment, points)


@dataclass(frozen=True)
class _AsOf:
    moment: PointInTime
    planner: Planner

    @property
    def lsn(self) -> LSN:
        """Every transaction that committed at or before this LSN is shown, and no later one. Pass it to read
        the same rows again."""
        return self.moment.lsn

    @property
    def epoch(self) -> Epoch:
        """The epoch of the LSN."""
        return self.moment.epoch

    @property
    def tables(self) -> tuple[str, ...]:
        """The tables that the nearest consistent point names, sorted."""
        return self.planner.tables

    def relation(self, table: str) -> Relation:
        """Return the source table's columns, types and key at the point in time. Raises what `table` does."""
        return self.planner.relation(_parse(table))

    def verified(self, table: str) -> bool:
        """Return True if all DDL up to the point in time is known to be reflected in the table. Raises what
        `table` does."""
        return self.planner.plan(_parse(table)).unverified is None

    def _plan(self, table: str) -> TablePlan:
        plan = self.planner.plan(_parse(table))
        if plan.unverified is not None:
            warnings.warn(str(plan.unverified), UnverifiedWarning, stacklevel=4)
        return plan

    def _history(self, plan: TablePlan) -> HistoryAsOf:
        return HistoryAsOf.find(self.planner.lake_root, plan.table, plan.schema, self.epoch, plan.lsn)


def _parse(table: str) -> TableName:
    try:
        return TableName.parse(table)
    except ValueError as error:
        raise LakeError(str(error)) from None


@dataclass(frozen=True)
class ArrowAsOf(_AsOf):
    """Tables as of one point in time, as Arrow tables."""

    def table(self, name: str) -> pa.Table:
        """Return the whole table. Warns with UnverifiedWarning. Raises LakeError, DriftError, ValueRangeError
        if the table cannot be read as of exactly this point."""
        return self._plan(name).rows()

    def history(self, name: str) -> pa.Table:
        """Return every row version up to the point in time, with its lifetime. The end of those valid then is
        null. Also raises LakeError if the table has no history."""
        plan = self._plan(name)
        return self._history(plan).arrow(plan.rows(), plan)

    def sql_reader(self, sql: str) -> AbstractContextManager[pa.RecordBatchReader]:
        """Run a query in DataFusion's SQL over the tables, named as in `public.orders`. Yields a reader of
        its rows.

        A table with changes since its nearest version is read into memory, and is stored in a temporary
        folder while the query runs. Raises ConfigError for a statement that is not a query, LakeError for a
        query that fails, and what `table` raises.
        """
        return sql_reader(sql, self.tables, self._source, str(self.lsn))

    def _source(self, table: str) -> DeltaTable | pa.Table:
        plan = self._plan(table)
        return plan.rows() if plan.overlays else plan.version.open()

    def for_spark(self, spark: SparkSession) -> SparkAsOf:
        """Return the same view for Spark. Raises ToolError if the session has no Delta."""
        check_delta(spark)
        return SparkAsOf(self.moment, self.planner, spark)


@dataclass(frozen=True)
class SparkAsOf(_AsOf):
    """Tables as of one point in time, as Spark data frames."""

    spark: SparkSession

    def table(self, name: str) -> DataFrame:
        """Return the table. Its rows are read when the frame is used, only on the executors.

        Warns with UnverifiedWarning. Raises LakeError and DriftError. Errors in single values are raised when
        the frame is used.
        """
        return self._frame(self._plan(name))

    def history(self, name: str) -> DataFrame:
        """Return every row version up to the point in time, with its lifetime. The end of those valid then is
        null. Also raises LakeError if the table has no history."""
        plan = self._plan(name)
        return self._history(plan).frame(self.spark, self._frame(plan), plan)

    def _frame(self, plan: TablePlan) -> DataFrame:

        return spark_overlay.frame_of(plan, self.spark)


def create_views(
    spark: SparkSession,
    pipeline: Pipeline,
    *,
    lsn: int | str | None = None,
    timestamp: datetime | None = None,
    epoch: int | None = None,
    prefix: str = "",
    names: Mapping[str, str] | None = None,
    variant: bool | Collection[str] = False,
) -> dict[str, str]:
    """Register every table of the pipeline as a temporary view of the session, all at one LSN. Return the
    views' names by table, quoted for SQL where necessary.

    A table of schema `public` keeps its name, and another one is named `<schema>_<table>`, both after the
    `prefix`. `names` gives other names for some tables. Views of an earlier call with the same names are
    replaced. Without an LSN or a timestamp, the newest consistent point is read. `variant`: True converts all
    json and jsonb columns to VARIANT, a collection only the listed ones, such as `public.t.c`.

    Raises what `as_of` raises, and ConfigError if two tables would get the same name or a column in `variant`
    is not json or jsonb. No view is registered then.
    """
    if lsn is None and timestamp is None:
        point = ConsistentPoints(pipeline.lake_root).at_or_before(2**63 - 1, epoch)
        if point is not None:
            lsn, epoch = point.lsn, point.epoch
    lake = as_of(spark, pipeline, lsn=lsn, timestamp=timestamp, epoch=epoch)
    if not lake.tables:
        raise LakeError(
            f"no consistent point at or before {lake.lsn} is kept, so which tables there were is not known",
            "the replication app writes the first one when the tables have caught up",
        )
    views = view_names(lake.tables, prefix, names or {})
    wanted = None if isinstance(variant, bool) else {ColumnName.parse(column) for column in variant}
    frames = {}
    for table in views:
        frame = lake.table(table)
        frames[table] = _with_variants(lake, table, frame, wanted) if variant else frame
    if wanted:
        listed = ", ".join(sorted(map(str, wanted)))
        raise ConfigError(f"variant: these columns are no json or jsonb column of a table here: {listed}")
    for table, view in views.items():
        frames[table].createOrReplaceTempView(view)
    return views


def view_names(tables: Collection[str], prefix: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return the views' names by table. Raises ConfigError if two tables would get the same name, or `names`
    has an unknown table."""
    given = {str(TableName.parse(table)): view for table, view in names.items()}
    unknown = sorted(given.keys() - set(tables))
    if unknown:
        raise ConfigError(f"names: not a table here: {', '.join(unknown)}", f"there are: {', '.join(tables)}")
    views = {table: given.get(table) or prefix + _plain_name(TableName.parse(table)) for table in tables}
    owners = defaultdict(list)
    for table, view in views.items():
        # Names in Spark are not case-sensitive.
        owners[view.casefold()].append(table)
    doubles = [" and ".join(owner) for owner in owners.values() if len(owner) > 1]
    if doubles:
        raise ConfigError(
            f"these tables would get one view name: {'; '.join(doubles)}",
            'name one of them otherwise, as names={"sales.orders": "orders_of_sales"}',
        )
    return {
        table: view if _UNQUOTED.fullmatch(view) else spark_overlay.quoted(view)
        for table, view in views.items()
    }


def _plain_name(table: TableName) -> str:
    return table.name if table.schema == _DEFAULT_SCHEMA else f"{table.schema}_{table.name}"


def _with_variants(
    lake: SparkAsOf, table: str, frame: DataFrame, wanted: set[ColumnName] | None
) -> DataFrame:
    """Return the frame with its JSON columns as VARIANT: all if `wanted` is None, otherwise those in it.
    These are removed from `wanted`."""
    from pyspark.sql import functions
    from pyspark.sql.types import StringType

    relation = lake.relation(table)
    strings = {field.name for field in frame.schema.fields if isinstance(field.dataType, StringType)}
    replaced = {}
    for column in relation.columns:
        name = ColumnName(relation.table, column.name)
        holds_json = column.type_oid in oids.JSON_TYPES and column.name in strings
        if holds_json and (wanted is None or name in wanted):
            replaced[column.name] = functions.parse_json(functions.col(spark_overlay.quoted(column.name)))
            if wanted is not None:
                wanted.discard(name)
    return frame.withColumns(replaced) if replaced else frame
