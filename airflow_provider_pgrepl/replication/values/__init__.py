"""PostgreSQL's types and values in Arrow: the same code for snapshot and stream.

Lossless or loud: what `parse` returns is exactly the value whose text it was given, or it raises.
"""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from airflow_provider_pgrepl.errors import TableError, ValueRangeError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.relation import Column, Relation, TableName
from airflow_provider_pgrepl.replication.values.family import Unholdable
from airflow_provider_pgrepl.replication.values.registry import family_of

COMMIT_LSN = "_pgrepl_commit_lsn"
COMMIT_TS = "_pgrepl_commit_ts"

__all__ = ["COMMIT_LSN", "COMMIT_TS", "csv_type", "lake_schema", "lake_type", "parse"]


def lake_type(column: Column, pipeline: Pipeline) -> pa.DataType:
    """The Arrow type that the column has in the lake."""
    return family_of(column).lake_type(column, pipeline)


def csv_type(column: Column, pipeline: Pipeline) -> pa.DataType | None:
    """The type to give pyarrow's CSV reader when what that accepts equals `parse`, else None: read a string.

    Holds for COPY's CSV with the options of `lake.copy.read_csv` (booleans are `t` and `f`).
    """
    family = family_of(column)
    return family.csv_type(family.lake_type(column, pipeline))


def parse(
    column: Column,
    texts: pa.Array | pa.ChunkedArray,
    pipeline: Pipeline,
    table: TableName | None = None,
) -> pa.Array:
    """Type the texts of one column (`string` or `large_string`; null is NULL) as its lake type.

    Above 2 GiB of values `string` and `binary` become `large_string` and `large_binary`.
    Raises ValueRangeError, which names the column, its type and (when given) the table, never the value.
    """
    if isinstance(texts, pa.ChunkedArray):
        chunks = [parse(column, chunk, pipeline, table) for chunk in texts.chunks]
        return _concatenate(chunks, lake_type(column, pipeline))
    family = family_of(column)
    target = family.lake_type(column, pipeline)
    try:
        return family.parse(texts, target)
    except Unholdable as unholdable:
        reason, hint = unholdable.reason, unholdable.hint
    of_table = f" of {table}" if table else ""
    raise ValueRangeError(
        f'column "{column.name}"{of_table} ({column.type_name}) holds a value that lake type {target} cannot:'
        f" {reason}",
        hint,
    )


def lake_schema(relation: Relation, pipeline: Pipeline) -> pa.Schema:
    """The lake table's columns: the relation's, then the bookkeeping ones that the pipeline wants.

    All are nullable: a key of the source says nothing about soft deletes or older versions in the lake.
    Raises TableError when two names differ only in case, which a lake table cannot hold.
    """
    fields = [pa.field(column.name, lake_type(column, pipeline)) for column in relation.columns]
    if pipeline.commit_lsn_column:
        fields.append(pa.field(COMMIT_LSN, pa.int64()))
    if pipeline.commit_ts_column:
        fields.append(pa.field(COMMIT_TS, pa.timestamp("us", "UTC")))
    counts = Counter(field.name.casefold() for field in fields)
    doubles = [f'"{field.name}"' for field in fields if counts[field.name.casefold()] > 1]
    if doubles:
        raise TableError(
            f"{relation.table}: the lake cannot tell the columns {', '.join(doubles)} apart",
            "rename one, or leave it out with a column list in the publication",
        )
    return pa.schema(fields)


def _concatenate(chunks: list[pa.Array], target: pa.DataType) -> pa.Array:
    """One array of all chunks, large when `target` cannot address so much."""
    large = {pa.string(): pa.large_string(), pa.binary(): pa.large_binary()}.get(target)
    if large is not None and (
        sum(chunk.nbytes for chunk in chunks) >= 2**31 or any(chunk.type == large for chunk in chunks)
    ):
        target = large
    return pa.concat_arrays([chunk.cast(target) for chunk in chunks]) if chunks else pa.array([], target)
