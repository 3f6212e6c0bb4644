"""Types made of types: whatever PostgreSQL writes comes back from the lake's value, by both ways in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.copy_csv import read_csv
from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.relations import find_relation
from tests.support.nested_types import SCALARS, Declared, Made, hstore, made_types, or_null
from tests.support.rendered import lake_texts, source_texts

BARE = {"commit_lsn_column": False, "commit_ts_column": False}
PIPELINE = Pipeline(name="p", lake="lake", tables=("s.t",), **BARE)
FEW = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@dataclass(frozen=True)
class Table:
    """Statements that make types, columns, and rows of SQL expressions."""

    statements: Sequence[str]
    columns: Sequence[Made]
    rows: Sequence[Sequence[str]]


@st.composite
def tables(draw: Any, scalars: list[Made]) -> Table:
    declared = Declared()
    columns = draw(st.lists(made_types(declared, scalars), min_size=1, max_size=4))
    rows = draw(st.lists(st.tuples(*map(or_null, columns)), max_size=6))
    return Table(declared.statements, columns, rows)


@pytest.fixture
def source(dsn: str):
    connection = connect(dsn, "test")
    yield connection
    connection.close()


@pytest.fixture
def debian_source(debian_dsn: str):
    connection = connect(debian_dsn, "test")
    yield connection
    connection.close()


def create(source: Any, statements: Sequence[str], columns: Sequence[str]) -> Relation:
    """A table of an id and columns c0, c1, …"""
    with source.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        named = ", ".join(f"c{index} {sql}" for index, sql in enumerate(columns))
        cursor.execute(f"create table s.t (id bigint generated always as identity, {named})")
    relation = find_relation(source, TableName("s", "t"))
    assert relation is not None
    return relation


def insert(source: Any, rows: Sequence[Sequence[str]]) -> None:
    with source.cursor() as cursor:
        for row in rows:
            cursor.execute(f"insert into s.t values (default, {', '.join(row)})")


def by_parse(source: Any, relation: Relation, pipeline: Pipeline = PIPELINE) -> pa.Table:
    """As from the stream."""
    typed = values.typed_columns(relation, pipeline)
    arrays = {
        column.name: column.parse(pa.array(source_texts(source, column.column), pa.large_string()))
        for column in typed
    }
    return pa.table(arrays).cast(values.lake_schema(relation, pipeline))


def by_csv(source: Any, relation: Relation, pipeline: Pipeline = PIPELINE) -> pa.Table:
    """As in a snapshot."""
    stream = io.BytesIO()
    names = ", ".join(column.name for column in relation.columns)
    with source.cursor() as cursor:
        cursor.copy_expert(f"copy (select {names} from s.t order by id) to stdout (format csv)", stream)
    stream.seek(0)
    batches = list(read_csv(stream, relation, pipeline, as_text=True))
    return pa.Table.from_batches(batches, values.lake_schema(relation, pipeline))


def check(source: Any, relation: Relation, pipeline: Pipeline = PIPELINE) -> pa.Table:
    parsed = by_parse(source, relation, pipeline)
    for table in (parsed, by_csv(source, relation, pipeline)):
        for column in relation.columns:
            expected = source_texts(source, column)
            assert lake_texts(source, column, table[column.name]) == expected, column.type_name
    return parsed


def reset(source: Any) -> None:
    with source.cursor() as cursor:
        cursor.execute("drop schema if exists s cascade; create schema s")


def check_tables(source: Any, scalars: list[Made]) -> None:
    @FEW
    @given(tables(scalars))
    def holds(table: Table) -> None:
        reset(source)
        relation = create(source, table.statements, [made.sql for made in table.columns])
        insert(source, table.rows)
        check(source, relation)

    holds()


def test_values_of_random_types_come_back_as_postgresql_writes_them(source):
    check_tables(source, SCALARS)


def test_so_do_those_of_types_that_hold_hstores(debian_source):
    check_tables(debian_source, [hstore(), hstore(), SCALARS[0], SCALARS[2]])
