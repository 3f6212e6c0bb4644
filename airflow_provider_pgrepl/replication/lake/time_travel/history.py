"""All versions of a table's rows as of one moment: those that had ended, and those valid then (no end).

The columns are those that the history has by now, and those that the table had at the moment. A version that
ended before a column was added has null there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl import hints
from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.delta.table import open_delta, query_delta
from airflow_provider_pgrepl.replication.lake.history.columns import (
    FROM_EPOCH,
    FROM_LSN,
    FROM_TS,
    TO_EPOCH,
    TO_LSN,
)
from airflow_provider_pgrepl.replication.lake.history.place import history_uri
from airflow_provider_pgrepl.replication.lake.history.table import aligned
from airflow_provider_pgrepl.replication.lake.time_travel import spark_overlay
from airflow_provider_pgrepl.replication.lake.time_travel.closed_versions import ended_since, evolved_closed
from airflow_provider_pgrepl.replication.lake.time_travel.plan import TablePlan
from airflow_provider_pgrepl.replication.lake.time_travel.table_version import TableVersion
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.partition_by import PARTITION
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FROM = {FROM_LSN: COMMIT_LSN, FROM_TS: COMMIT_TS}


@dataclass(frozen=True)
class HistoryAt:
    """The history of a table up to a moment; it is only ever appended to, so a later version will do.

    `schema`: the columns of the result.
    """

    version: TableVersion
    schema: pa.Schema
    epoch: Epoch
    lsn: LSN

    @classmethod
    def find(cls, lake_root: str, table: TableName, current: pa.Schema, epoch: Epoch, lsn: LSN) -> HistoryAt:
        """`current`: the lake table's columns at the moment. Raises LakeError when the table keeps none."""
        uri = history_uri(lake_root, table)
        try:
            opened = open_delta(uri)
        except (DeltaError, TableNotFoundError, OSError):
            raise LakeError(
                f"{table} keeps no history in the lake",
                f"set history: true, for the pipeline or under per_table, and {hints.resnapshot(table)}",
            ) from None
        schema = _united(pa.schema(opened.schema().to_arrow()), current)
        return cls(TableVersion(table, uri, int(opened.version())), schema, epoch, lsn)

    def arrow(self, current: pa.Table, plan: TablePlan | None = None) -> pa.Table:
        """All versions: those of the history, those that the plan's changes end, and the `current` rows."""
        sql = f"select * from it where {self._ended}"  # noqa: S608 - names and numbers of ours
        opened = self.version.open()
        held = pa.schema(opened.schema().to_arrow())
        closed = query_delta(opened, sql).cast(held)
        pieces = [_begun(current, self.epoch)]
        if plan is not None:
            closed = evolved_closed(closed, plan.overlays)
            pieces.append(ended_since(plan, self.schema, self.epoch))
        return pa.concat_tables([aligned(piece, self.schema) for piece in (closed, *pieces)])

    def frame(self, spark: SparkSession, current: DataFrame, plan: TablePlan | None = None) -> DataFrame:
        """The same, for Spark."""
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


def _united(history: pa.Schema, current: pa.Schema) -> pa.Schema:
    """The history's columns, and those that the table has got since; of two types the wider one."""
    own = {*_FROM.values(), DELETED, PARTITION}
    fields = {field.name: field for field in history}
    for field in current:
        if field.name not in own:
            known = fields.get(field.name)
            fields[field.name] = field if known is None else _wider(known, field)
    return pa.schema(list(fields.values()))


def _wider(one: pa.Field, other: pa.Field) -> pa.Field:
    if pa.types.is_string(one.type) or pa.types.is_string(other.type):
        return one.with_type(pa.string())
    try:
        both = pa.unify_schemas([pa.schema([one]), pa.schema([other])], promote_options="permissive")
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        return one
    return both.field(0)


def _begun(current: pa.Table, epoch: Epoch) -> pa.Table:
    if DELETED in current.column_names:
        current = current.filter(pc.invert(current[DELETED])).drop_columns([DELETED])
    for name, own in _FROM.items():
        if own in current.column_names:
            at = current.schema.get_field_index(own)
            current = current.set_column(at, name, current[own])
    return current.append_column(FROM_EPOCH, pa.repeat(pa.scalar(int(epoch), pa.int64()), len(current)))
