"""All versions of a table's rows as of one moment: those that had ended, and those valid then (no end)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.history.place import (
    FROM_EPOCH,
    FROM_LSN,
    FROM_TS,
    TO_EPOCH,
    TO_LSN,
    history_uri,
)
from airflow_provider_pgrepl.replication.lake.history.rows import ended_rows
from airflow_provider_pgrepl.replication.lake.reading.overlay import OverlayJob
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.relation import TableName
from airflow_provider_pgrepl.replication.values import COMMIT_LSN, COMMIT_TS, DELETED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_FROM = {FROM_LSN: COMMIT_LSN, FROM_TS: COMMIT_TS}


@dataclass(frozen=True)
class HistoryAt:
    """The history of a table up to a moment; it is only ever appended to, so a later version will do."""

    uri: str
    version: int
    epoch: Epoch
    lsn: LSN

    @classmethod
    def find(cls, lake_root: str, table: TableName, epoch: Epoch, lsn: LSN) -> HistoryAt:
        """Raises LakeError when the table keeps none."""
        uri = history_uri(lake_root, table)
        try:
            return cls(uri, int(DeltaTable(uri).version()), epoch, lsn)
        except (DeltaError, TableNotFoundError, OSError):
            raise LakeError(
                f"{table} keeps no history in the lake",
                "set history: true, for the pipeline or under per_table, and take the table anew: run the"
                " snapshot app with --tables",
            ) from None

    @property
    def _ended(self) -> str:
        epoch, lsn = int(self.epoch), int(self.lsn)
        return f"{TO_EPOCH} < {epoch} or ({TO_EPOCH} = {epoch} and {TO_LSN} <= {lsn})"

    def arrow(self, current: pa.Table, ended: pa.Table | None = None) -> pa.Table:
        """All versions: those of the history, those that `ended` since, and the `current` rows."""
        opened = DeltaTable(self.uri, version=self.version)
        schema = pa.schema(opened.schema().to_arrow())
        sql = f"select * from h where {self._ended}"  # noqa: S608 - names and numbers of ours
        closed = pa.table(QueryBuilder().register("h", opened).execute(sql).read_all())
        pieces = [closed, _begun(current, self.epoch), *([] if ended is None else [ended])]
        return pa.concat_tables([_aligned(piece, schema) for piece in pieces])

    def frame(self, spark: SparkSession, current: DataFrame, ended: DataFrame | None = None) -> DataFrame:
        """The same, for Spark."""
        from pyspark.sql import functions

        closed = self.versions(spark).where(self._ended)
        if DELETED in current.columns:
            current = current.where(f"not {DELETED}").drop(DELETED)
        names = {COMMIT_LSN: FROM_LSN, COMMIT_TS: FROM_TS}
        current = current.withColumnsRenamed(names).withColumn(FROM_EPOCH, functions.lit(int(self.epoch)))
        every = closed.unionByName(current, allowMissingColumns=True)
        return every if ended is None else every.unionByName(ended, allowMissingColumns=True)

    def versions(self, spark: SparkSession) -> DataFrame:
        """All that the history holds, later versions among it."""
        return spark.read.format("delta").option("versionAsOf", self.version).load(self.uri)


def ended_since(job: OverlayJob, uri: str, version: int, epoch: Epoch) -> pa.Table:
    """The versions of rows that an overlay's changes end. Raises LakeTableError, ValueRangeError."""
    table = DeltaTable(uri, version=version)
    rows = ended_rows(table, job.changes(), job.relation, job.pipeline, epoch, job.above)
    pieces = list(rows)
    return pa.concat_tables(pieces, promote_options="permissive") if pieces else pa.table({})


def _begun(current: pa.Table, epoch: Epoch) -> pa.Table:
    if DELETED in current.column_names:
        current = current.filter(pc.invert(current[DELETED])).drop_columns([DELETED])
    for name, own in _FROM.items():
        if own in current.column_names:
            at = current.schema.get_field_index(own)
            current = current.set_column(at, name, current[own])
    return current.append_column(FROM_EPOCH, pa.repeat(pa.scalar(int(epoch), pa.int64()), len(current)))


def _aligned(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """In the history's columns; one that the table has not, or no more, is null."""
    columns = [
        rows[field.name].cast(field.type)
        if field.name in rows.column_names
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)
