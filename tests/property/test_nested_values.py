"""Types made of types: whatever PostgreSQL writes comes back from the lake's value, by both ways in."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.lake.snapshot.csv import read_csv
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import connect
from tests.support.examples import examples
from tests.support.nested_types import SCALARS, Declared, Made, hstore, made_types, or_null
from tests.support.rendered import lake_texts, source_texts, written

BARE = {"commit_lsn_column": False, "commit_ts_column": False}
PIPELINE = Pipeline(name="p", lake="/lake", tables=("s.t",), **BARE)
FEW = examples(25, HealthCheck.data_too_large)


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
    """Return the source's rows as the stream types them."""
    typed = values.typed_columns(relation, pipeline.options(relation.table))
    arrays = {
        column.name: column.parse(pa.array(source_texts(source, column.column), pa.large_string()))
        for column in typed
    }
    return pa.table(arrays).cast(values.lake_schema(relation, pipeline.options(relation.table)))


def by_csv(source: Any, relation: Relation, pipeline: Pipeline = PIPELINE) -> pa.Table:
    """Return the source's rows as a snapshot types them."""
    stream = io.BytesIO()
    names = ", ".join(column.name for column in relation.columns)
    with source.cursor() as cursor:
        cursor.copy_expert(f"copy (select {names} from s.t order by id) to stdout (format csv)", stream)
    stream.seek(0)
    batches = list(read_csv(stream, relation, pipeline.options(relation.table), as_text=True))
    return pa.Table.from_batches(batches, values.lake_schema(relation, pipeline.options(relation.table)))


def check(source: Any, relation: Relation, pipeline: Pipeline = PIPELINE) -> pa.Table:
    parsed = by_parse(source, relation, pipeline)
    for table in (parsed, by_csv(source, relation, pipeline)):
        for column in relation.columns:
            expected = source_texts(source, column)
            found = table[column.name]
            assert lake_texts(source, column, found) == expected, column.type_name
            assert written(found, column) == expected, column.type_name
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


def test_values_containing_hstores_survive_lake_round_trip(debian_source):
    check_tables(debian_source, [hstore(), hstore(), SCALARS[0], SCALARS[2]])


def test_pgvectors_numbers_are_held_to_the_last_bit(source):
    with source.cursor() as cursor:
        cursor.execute("create schema s; create extension vector schema pg_catalog")
    relation = create(source, [], ["vector(3)", "halfvec(3)", "sparsevec(3)", "vector[]"])

    @FEW
    @given(st.lists(st.lists(_floats(width=32), min_size=3, max_size=3), max_size=5), _floats(width=16))
    def holds(rows: list[list[float]], half: float) -> None:
        with source.cursor() as cursor:
            cursor.execute("truncate s.t")
        halves = f"array[{half!r}, 0, -1]::real[]::halfvec"
        insert(
            source,
            [
                [of := f"array{row!r}::real[]::vector", halves, f"({of})::sparsevec", f"array[{of}, null]"]
                for row in rows
            ],
        )
        check(source, relation)

    holds()


def _floats(width: int) -> st.SearchStrategy[float]:
    return st.floats(width=width, allow_nan=False, allow_infinity=False)


TWO = "array(2)"
ODD = [
    ("int[]", "array[[1,2],[3,null]]", TWO),
    ("int[]", "'{}'", TWO),
    ("text[]", """array[['a}', '{"'], ['NULL', null]]""", TWO),
    ("box[]", "array[[box '(1,1),(0,0)', '(2,2),(1,1)']]", TWO),
    ("s.whole", "array[[1],[2]]", TWO),
    ("s.whole[]", """'{"{1,2}",NULL,"{}"}'""", None),
    ("int[]", "'[0:1]={1,2}'", "string"),
    ("s.upper", """row('a', 'b')::s.upper""", None),
    ("s.bare", "row()::s.bare", None),
    ("s.whole_range", "s.whole_range('{1}', '{2,3}')", None),
    ("varbit[]", "array[b'101', null]", None),
    ('"char"[]', """array['a', '"', ',']::"char"[]""", None),
    ("money[]", "array[1234567.89, null]::money[]", None),
    ("interval[]", "array[interval '1 day -2 hours']", None),
]


def test_odd_values_come_back_as_postgresql_writes_them(source):
    statements = [
        "create schema s",
        "create domain s.whole as int[]",
        'create type s.upper as (a text, "A" text)',
        "create type s.bare as ()",
        "create type s.whole_range as range (subtype = int[])",
    ]
    relation = create(source, statements, [of for of, _, _ in ODD])
    insert(source, [[value for _, value, _ in ODD], [f"null::{of}" for of, _, _ in ODD]])
    types = {f"s.t.c{index}": chosen for index, (_, _, chosen) in enumerate(ODD) if chosen}
    table = check(source, relation, Pipeline(name="p", lake="/lake", tables=("s.t",), types=types, **BARE))
    assert [table[f"c{index}"].null_count for index in range(len(ODD))] == [1] * len(ODD)
