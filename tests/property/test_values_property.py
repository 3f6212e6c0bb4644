"""PostgreSQL says what a value is: whatever it writes comes back from the lake's value, by both ways in."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from json import dumps
from typing import Any

import numpy as np
import psycopg2.extensions
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.copy_csv import OddValueError, read_csv, whole_rows
from airflow_provider_pgrepl.replication.relation import Relation, TableName
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.relations import find_relation
from airflow_provider_pgrepl.replication.values.gregorian import days_since_epoch

PIPELINE = Pipeline(name="p", lake="lake", tables=("public.t",))
_PG_FIRST_DAY, _PG_LAST_DAY = -2_440_588, 2_145_042_905  # 4714-11-24 BC, 5874897-12-31
_LAKE_LAST_DAY = 2**63 // 86_400_000_000 - 1
_DAY = 86_400_000_000


@dataclass(frozen=True)
class Case:
    """A type: texts to insert it from, SQL from text `x` to it, and SQL text of an Arrow value."""

    type_sql: str
    inputs: st.SearchStrategy[str]
    insert: str = ""
    back: str = "x"
    show: Callable[[Any], str] = str

    @property
    def insert_sql(self) -> str:
        return self.insert or f"x::{self.type_sql}"


def _moments() -> st.SearchStrategy[str]:
    edges = st.sampled_from(
        [-719_528, -719_529, -719_162, 2_932_896, 2_932_897, _PG_FIRST_DAY, _LAKE_LAST_DAY]
    )
    days = edges | st.integers(_PG_FIRST_DAY, _LAKE_LAST_DAY) | st.integers(-800_000, 3_000_000)
    micros = st.integers(0, _DAY - 1) | st.sampled_from([0, 1, 100_000, _DAY - 1])
    return st.tuples(days, micros).map(lambda pair: f"{pair[0]} {pair[1]}")


def _days() -> st.SearchStrategy[str]:
    edges = st.sampled_from([-719_528, -719_529, -719_162, 2_932_896, 2_932_897])
    return (edges | st.integers(_PG_FIRST_DAY, _PG_LAST_DAY) | st.integers(-800_000, 3_000_000)).map(str)


def _moment(base: str) -> str:
    return (
        f"{base} + make_interval(days => split_part(x, ' ', 1)::int)"
        " + interval '1 microsecond' * split_part(x, ' ', 2)::bigint"
    )


_TIMESTAMP = _moment("timestamp '1970-01-01'")
_TIMESTAMPTZ = _moment("timestamptz '1970-01-01 00:00:00+00'")


def _decimal_text(number: int, scale: int) -> str:
    sign, digits = ("-" if number < 0 else ""), str(abs(number)).zfill(scale + 1)
    return f"{sign}{digits[: len(digits) - scale]}.{digits[len(digits) - scale :]}"


def _numeric(precision: int, scale: int) -> Case:
    numbers = st.integers(-(10**precision) + 1, 10**precision - 1) | st.sampled_from(
        [0, 1, -1, 10**precision - 1]
    )
    return Case(
        f"numeric({precision},{scale})",
        numbers.map(lambda number: _decimal_text(number, scale)),
        back=f"(x::numeric({precision},{scale}))::text",
        show=lambda value: f"{value:f}",
    )


def _float(type_sql: str, width: int, dtype: type[np.floating[Any]]) -> Case:
    edges = st.sampled_from(
        [0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1.0, 1e15, 0.1 if width == 64 else 0.5]
    )
    return Case(
        type_sql,
        (st.floats(width=width) | edges).map(lambda number: str(dtype(number))),
        back=f"(x::{type_sql})::text",
        show=lambda value: str(dtype(value)),
    )


_CHARACTERS = st.characters(exclude_categories=("Cs",), exclude_characters="\0")
_TEXTS = st.text(_CHARACTERS, max_size=40) | st.text('",\\\n\r\t .\ufeffNtf0', max_size=8)

CASES = [
    Case("smallint", st.integers(-(2**15), 2**15 - 1).map(str)),
    Case("integer", st.integers(-(2**31), 2**31 - 1).map(str)),
    Case("bigint", st.integers(-(2**63), 2**63 - 1).map(str)),
    _float("real", 32, np.float32),
    _float("double precision", 64, np.float64),
    _numeric(1, 0),
    _numeric(10, 2),
    _numeric(18, 18),
    _numeric(19, 4),
    _numeric(38, 0),
    _numeric(38, 19),
    _numeric(38, 38),
    Case(
        "numeric",
        st.decimals(allow_nan=False, allow_infinity=False).map(lambda number: f"{number:E}")
        | st.sampled_from(["NaN", "Infinity", "-Infinity", "1e-400", "-1.500", "9" * 60]),
    ),
    Case("numeric(50,5)", st.integers(-(10**44), 10**44).map(str)),
    Case("boolean", st.sampled_from(["t", "f"]), show=lambda value: "t" if value else "f"),
    Case("text", _TEXTS),
    Case("varchar(50)", _TEXTS),
    Case("char(50)", _TEXTS),
    Case(
        "bytea", st.binary(max_size=40).map(lambda b: "\\x" + b.hex()), show=lambda value: "\\x" + value.hex()
    ),
    Case("date", _days(), "date '1970-01-01' + x::int", "(date '1970-01-01' + x::int)::text"),
    Case("timestamp", _moments(), _TIMESTAMP, f"({_TIMESTAMP})::text"),
    Case("timestamptz", _moments(), _TIMESTAMPTZ, f"({_TIMESTAMPTZ})::text"),
    Case("time", st.times().map(str) | st.just("24:00:00")),
    Case("uuid", st.uuids().map(str)),
    Case("json", _TEXTS.map(lambda text: '{"a" : ' + dumps(text) + ', "a":1}')),
    Case("jsonb", st.sampled_from(['{"b": 1, "a": [1.10, null]}', '"x"', "12345678901234567890.5"])),
    Case("text[]", st.sampled_from(['{a,"b,c",NULL}', "{}", '{"\\"","\\\\"}'])),
    Case("interval", st.sampled_from(["1 year -3 days 00:00:01.5", "0"])),
]
_RAW_OIDS = (16, 17, 20, 21, 23, 114, 700, 701, 1009, 1082, 1083, 1114, 1184, 1186, 1700, 3802)
_RAW = psycopg2.extensions.new_type(_RAW_OIDS, "RAW", lambda text, cursor: text)


@pytest.fixture
def source(dsn: str):
    connection = connect(dsn, "test")
    yield connection
    connection.close()


def _create(source: Any, cases: Sequence[Case]) -> Relation:
    """A table with a column for each case (c0, c1, …)."""
    with source.cursor() as cursor:
        columns = ", ".join(f"c{index} {case.type_sql}" for index, case in enumerate(cases))
        cursor.execute(f"create table public.t ({columns})")
    relation = find_relation(source, TableName("public", "t"))
    assert relation is not None
    return relation


def _fill(source: Any, cases: Sequence[Case], rows: Sequence[Sequence[str | None]]) -> None:
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


def _by_csv(source: Any, relation: Relation, *, as_text: bool) -> pa.Table:
    columns = ", ".join(column.name for column in relation.columns)
    stream = io.BytesIO()
    with source.cursor() as cursor:
        cursor.copy_expert(
            f"copy (select {columns} from public.t order by ctid) to stdout (format csv)", stream
        )
    stream.seek(0)
    return pa.Table.from_batches(
        list(read_csv(stream, relation, PIPELINE, as_text=as_text)),
        pa.schema(
            [
                (column.name, values.typed_column(column, relation.table, PIPELINE).lake_type)
                for column in relation.columns
            ]
        ),
    )


def _by_parse(relation: Relation, texts: Sequence[Sequence[str | None]]) -> pa.Table:
    arrays = [
        typed.parse(pa.array([row[index] for row in texts], pa.large_string()))
        for index, typed in enumerate(values.typed_columns(relation, PIPELINE))
    ]
    return pa.table(arrays, names=[column.name for column in relation.columns])


def _texts(source: Any) -> list[tuple[str | None, ...]]:
    """What PostgreSQL says that the values are."""
    with source.cursor() as cursor:
        psycopg2.extensions.register_type(_RAW, cursor)
        cursor.execute("select * from public.t order by ctid")
        return list(cursor.fetchall())


def _shown(source: Any, case: Case, array: pa.ChunkedArray) -> list[str | None]:
    """What PostgreSQL says that the lake's values are."""
    if pa.types.is_date32(array.type):
        inputs = [None if number is None else str(number) for number in array.cast(pa.int32()).to_pylist()]
    elif pa.types.is_timestamp(array.type):
        numbers = array.cast(pa.int64()).to_pylist()
        inputs = [None if number is None else "{} {}".format(*divmod(number, _DAY)) for number in numbers]
    else:
        inputs = [None if value is None else case.show(value) for value in array.to_pylist()]
    with source.cursor() as cursor:
        cursor.execute(
            f"select {case.back} from unnest(%s::text[]) with ordinality u(x, n) order by n", (inputs,)
        )
        return [row[0] for row in cursor.fetchall()]


def _check(
    source: Any, relation: Relation, cases: Sequence[Case], rows: Sequence[Sequence[str | None]]
) -> None:
    _fill(source, cases, rows)
    texts = _texts(source)
    ways = [_by_parse(relation, texts), _by_csv(source, relation, as_text=True)]
    try:
        ways.append(_by_csv(source, relation, as_text=False))
    except OddValueError:
        assert any(_is_odd(text) for row in texts for text in row)
    for table in ways:
        for index, case in enumerate(cases):
            assert table.column(index).type == values.typed_columns(relation, PIPELINE)[index].lake_type
            assert _shown(source, case, table.column(index)) == [row[index] for row in texts]


def _is_odd(text: str | None) -> bool:
    """Whether it may be a date that pyarrow cannot read: before Christ, or after 9999."""
    return text is not None and re.search(r" BC$|^\d{5,}-", text) is not None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.type_sql)
def test_a_column_of_any_type_comes_back_as_postgresql_writes_it(source, case):
    relation = _create(source, [case])

    @settings(max_examples=30, deadline=None)
    @given(st.lists(st.none() | case.inputs, max_size=12))
    def check(inputs):
        _check(source, relation, [case], [[text] for text in inputs])

    check()


def test_rows_of_all_types_come_back_as_postgresql_writes_them(source):
    relation = _create(source, CASES)

    @settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(st.tuples(*(st.none() | case.inputs for case in CASES)), max_size=4))
    def check(rows):
        _check(source, relation, CASES, rows)

    check()


@given(st.dates())
def test_the_calendar_agrees_with_pythons_where_that_reaches(day):
    fields = (np.array([number]) for number in (day.year, day.month, day.day))
    assert days_since_epoch(*fields)[0] == (day - date(1970, 1, 1)).days


@settings(deadline=None)
@given(st.lists(st.text('x\n"', max_size=9), max_size=30), st.integers(1, 40))
def test_pieces_of_any_size_are_whole_rows_and_together_the_stream(texts, block_bytes):
    rows = [b'"%s"\n' % text.replace('"', '""').encode() for text in texts]
    pieces = list(whole_rows(io.BytesIO(b"".join(rows)), block_bytes))
    assert b"".join(pieces) == b"".join(rows)
    ends = {sum(map(len, rows[: index + 1])) for index in range(len(rows))}
    assert {sum(map(len, pieces[: index + 1])) for index in range(len(pieces))} <= ends
