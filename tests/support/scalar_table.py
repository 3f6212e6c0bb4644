"""A table of scalar values, read all ways: PostgreSQL's texts, the snapshot's values, the stream's."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import psycopg2.extensions
import pyarrow as pa

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.lake.snapshot.csv import read_csv
from airflow_provider_pgrepl.replication.postgres.names import TableName, quote_identifier
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from tests.support.scalar_types import DAY, Case

# For all built-in types, so that psycopg2 returns their text unchanged.
_RAW = psycopg2.extensions.new_type(tuple(range(1, 16384)), "RAW", lambda text, cursor: text)


def create(source: Any, cases: Sequence[Case]) -> Relation:
    """A table with a column for each case (c0, c1, …)."""
    with source.cursor() as cursor:
        columns = ", ".join(f"c{index} {case.type_sql}" for index, case in enumerate(cases))
        cursor.execute(f"drop table if exists public.t; create table public.t ({columns})")
    relation = find_relation(source, TableName("public", "t"))
    assert relation is not None
    return relation


def fill(source: Any, cases: Sequence[Case], rows: Sequence[Sequence[str | None]]) -> None:
    """Make these the table's rows."""
    inputs = ", ".join(
        f"(select {case.insert_sql} from (select u.x{index}) v(x))" for index, case in enumerate(cases)
    )
    arrays = ", ".join("%s::text[]" for _ in cases)
    names = ", ".join(f"x{index}" for index in range(len(cases)))
    columns = [[row[index] for row in rows] for index in range(len(cases))]
    with source.cursor() as cursor:
        cursor.execute("truncate public.t")
        cursor.execute(
            f"insert into public.t select {inputs}"
            f" from unnest({arrays}) with ordinality u({names}, n) order by n",
            columns,
        )


def by_csv(source: Any, relation: Relation, pipeline: Pipeline, *, as_text: bool) -> pa.Table:
    """Return the rows as a snapshot types them."""
    columns = ", ".join(quote_identifier(column.name) for column in relation.columns)
    stream = io.BytesIO()
    with source.cursor() as cursor:
        cursor.copy_expert(
            f"copy (select {columns} from public.t order by ctid) to stdout (format csv)", stream
        )
    stream.seek(0)
    return pa.Table.from_batches(
        list(read_csv(stream, relation, pipeline.options(relation.table), as_text=as_text)),
        pa.schema(
            [
                (typed.name, typed.lake_type)
                for typed in values.typed_columns(relation, pipeline.options(relation.table))
            ]
        ),
    )


def by_parse(relation: Relation, pipeline: Pipeline, texts: Sequence[Sequence[str | None]]) -> pa.Table:
    """Return the rows as the stream types them."""
    arrays = [
        typed.parse(pa.array([row[index] for row in texts], pa.large_string()))
        for index, typed in enumerate(values.typed_columns(relation, pipeline.options(relation.table)))
    ]
    return pa.table(arrays, names=[column.name for column in relation.columns])


def texts_of(source: Any) -> list[tuple[str | None, ...]]:
    """Return PostgreSQL's text of the table's values."""
    with source.cursor() as cursor:
        psycopg2.extensions.register_type(_RAW, cursor)
        cursor.execute("select * from public.t order by ctid")
        return list(cursor.fetchall())


def shown(source: Any, case: Case, array: pa.ChunkedArray) -> list[str | None]:
    """Return PostgreSQL's text of the lake's values."""
    if pa.types.is_date32(array.type):
        inputs = [None if number is None else str(number) for number in array.cast(pa.int32()).to_pylist()]
    elif pa.types.is_timestamp(array.type):
        numbers = array.cast(pa.int64()).to_pylist()
        inputs = [None if number is None else "{} {}".format(*divmod(number, DAY)) for number in numbers]
    else:
        inputs = [None if value is None else case.show(value) for value in array.to_pylist()]
    with source.cursor() as cursor:
        cursor.execute(
            f"select {case.back} from unnest(%s::text[]) with ordinality u(x, n) order by n", (inputs,)
        )
        return [row[0] for row in cursor.fetchall()]
