"""Texts of widened columns: what PostgreSQL writes after its own ALTER."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.schema_evolution.translation import widened_text
from airflow_provider_pgrepl.replication.postgres.relation import Column
from tests.support.examples import examples

FLOATS = st.binary(min_size=4, max_size=4).map(lambda raw: struct.unpack("<f", raw)[0])


def column(source, type_name):
    with source.cursor() as cursor:
        cursor.execute(f"create temp table shape (c {type_name})")
        cursor.execute(
            "select atttypid::bigint, atttypmod from pg_attribute"
            " where attrelid = 'shape'::regclass and attnum > 0"
        )
        oid, typmod = cursor.fetchone()
        cursor.execute("drop table shape")
    return Column("c", 1, oid, typmod, type_name)


def assert_as_postgresql(source, before, after, texts):
    with source.cursor() as cursor:
        shown = "case when t is not null then format('%%s', t::{}) end"
        was, now = shown.format(before), shown.format(f"{before}::{after}")
        cursor.execute(
            f"select array_agg({was} order by n), array_agg({now} order by n)"
            " from unnest(%s::text[]) with ordinality u (t, n)",
            (texts,),
        )
        was, now = cursor.fetchone()
    made = widened_text(pa.array(was, pa.large_string()), column(source, before), column(source, after))
    assert made.to_pylist() == now


@examples(20)
@given(st.lists(FLOATS, min_size=1, max_size=200))
def test_a_real_that_becomes_double_precision(source, numbers):
    assert_as_postgresql(source, "float4", "float8", [repr(number) for number in numbers])


def test_reals_where_the_notation_changes(source):
    numbers = [
        *(f"{sign}{digits}e{exponent}" for sign in ("", "-") for digits in ("1", "1.25", "9.999999")
          for exponent in (-6, -5, -4, -3, 0, 5, 6, 13, 14, 15, 16, 17)),
        *("0", "-0", "NaN", "Infinity", "-Infinity", "1e-45", "3.4028235e38", "1.1"),
    ]  # fmt: skip
    assert_as_postgresql(source, "float4", "float8", numbers)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("numeric(5,2)", "numeric(7,2)"),
        ("numeric(5,2)", "numeric(9,4)"),
        ("numeric(5,0)", "numeric(9,4)"),
        ("numeric(5,-2)", "numeric(9,1)"),
        ("numeric(5,2)", "numeric"),
    ],
)
def test_a_numeric_of_more_digits(source, before, after):
    assert_as_postgresql(source, before, after, ["0", "-1.25", "99", "300", "NaN", "-120.5", None])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("varchar(8)", "text"),
        ("varchar(8)", "varchar(20)"),
        ("int2", "int8"),
    ],
)
def test_other_types_that_become_wider(source, before, after):
    assert_as_postgresql(source, before, after, ["0", "12", None])
