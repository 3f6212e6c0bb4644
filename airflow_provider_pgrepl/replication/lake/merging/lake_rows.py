"""Rows of a lake table that equal given ones: exact, and in batches, so that only those are held."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.replication.lake.merging.row_codes import row_codes
from airflow_provider_pgrepl.replication.lake.merging.tuples import Ints
from airflow_provider_pgrepl.replication.names import quote_identifier


def rows_equal_to(table: DeltaTable, wanted: pa.Table, more: list[str]) -> tuple[pa.Table, Ints]:
    """The rows of the table, as the handle has it, that equal one of `wanted` in its columns; and which.

    The rows have the columns of `wanted`, then `more`.
    """
    schema = pa.schema(table.schema().to_arrow())
    names = [*wanted.schema.names, *(name for name in more if name not in wanted.schema.names)]
    schema = pa.schema([schema.field(name) for name in names])
    wanted = wanted.cast(pa.schema([schema.field(name) for name in wanted.schema.names]))
    telling = _telling_column(wanted)
    selected = ", ".join(map(quote_identifier, names))
    found = [schema.empty_table()]
    query = f"select {selected} from t"  # noqa: S608 - quoted names
    for batch in QueryBuilder().register("t", table).execute(query):
        rows = _plain(batch, schema)
        if telling is not None:
            rows = rows.filter(pc.is_in(rows[telling], wanted[telling].combine_chunks()))
        found.append(rows)
    rows = pa.concat_tables(found)
    which = match_rows(rows, wanted)
    return rows.filter(pa.array(which >= 0)), which[which >= 0]


def match_rows(rows: pa.Table, wanted: pa.Table) -> Ints:
    """For each row the number of the one in `wanted`, whose rows differ, that it equals; -1: none."""
    columns = (
        pa.chunked_array([*rows[name].chunks, *wanted[name].cast(rows[name].type).chunks]).combine_chunks()
        for name in wanted.schema.names
    )
    codes = row_codes(columns, len(rows) + len(wanted))
    number = np.full(int(codes.max(initial=-1)) + 1, -1, np.int64)
    number[codes[len(rows) :]] = np.arange(len(wanted))
    return number[codes[: len(rows)]]


def _plain(batch: object, schema: pa.Schema) -> pa.Table:
    """DataFusion gives view types of its own."""
    return pa.Table.from_batches([pa.record_batch(batch)]).cast(schema)


def _telling_column(wanted: pa.Table) -> str | None:
    """The column that tells most rows apart; equality of nested and of floating values is not Arrow's."""
    plain = [
        field.name
        for field in wanted.schema
        if not pa.types.is_nested(field.type) and not pa.types.is_floating(field.type)
    ]
    return max(plain, key=lambda name: len(wanted[name].unique()), default=None)
