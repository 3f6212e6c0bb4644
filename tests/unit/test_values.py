"""The lake type of a column, and the handling of values that it cannot hold."""

from __future__ import annotations

import traceback
from dataclasses import replace
from decimal import Decimal

import pyarrow as pa
import pytest

from airflow_provider_pgrepl.errors import ConfigError, TableError, ValueRangeError
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values import lake_schema, typed_column

PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.t",))
AS_STRING = Pipeline(name="p", lake="/lake", tables=("public.t",), timestamp_without_tz="string")
BARE = Pipeline(name="p", lake="/lake", tables=("public.t",), commit_lsn_column=False, commit_ts_column=False)
BOOL, BYTEA, INT8, INT2, INT4, TEXT, FLOAT4, FLOAT8 = 16, 17, 20, 21, 23, 25, 700, 701
DATE, TIMESTAMP, TIMESTAMPTZ, NUMERIC, UUID = 1082, 1114, 1184, 1700, 2950
INT2VECTOR, OID, XID, CID, MONEY, XID8 = 22, 26, 28, 29, 790, 5069


def column(type_oid, typmod=-1, name="c"):
    return Column(name, 1, type_oid, typmod, f"type {type_oid}")


def typed(of, pipeline=PIPELINE):
    table = TableName("sales", "orders")
    return typed_column(of, table, pipeline.options(table))


def numeric(precision, scale):
    return column(NUMERIC, ((precision << 16) | (scale & 0x7FF)) + 4)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (column(INT2), pa.int16()),
        (column(INT4), pa.int32()),
        (column(INT8), pa.int64()),
        (column(FLOAT4), pa.float32()),
        (column(FLOAT8), pa.float64()),
        (column(BOOL), pa.bool_()),
        (column(BYTEA), pa.binary()),
        (column(DATE), pa.date32()),
        (column(TIMESTAMP), pa.timestamp("us")),
        (column(TIMESTAMPTZ), pa.timestamp("us", "UTC")),
        (column(TEXT), pa.string()),
        (column(UUID), pa.string()),
        (column(MONEY), pa.decimal128(19, 2)),
        (column(OID), pa.int64()),
        (column(XID), pa.int64()),
        (column(CID), pa.int64()),
        (column(XID8), pa.decimal128(20, 0)),
        (column(INT2VECTOR), pa.string()),
        (column(99999), pa.string()),
        (numeric(10, 2), pa.decimal128(10, 2)),
        (numeric(38, 38), pa.decimal128(38, 38)),
        (numeric(39, 2), pa.string()),
        (numeric(5, -2), pa.string()),
        (numeric(3, 5), pa.string()),
        (column(NUMERIC), pa.string()),
    ],
)
def test_a_column_gets_its_lake_type(of, expected):
    assert typed(of).lake_type == expected
    assert typed(of).csv_type in (expected, None)
    assert typed(of).parse(pa.array([None, None], pa.string())).type == expected
    assert typed(of).parse(pa.chunked_array([], pa.string())).type == expected


def test_timestamp_without_zone_is_text_by_the_pipelines_choice():
    of = column(TIMESTAMP)
    assert typed(of, AS_STRING).lake_type == typed(of, AS_STRING).csv_type == pa.string()
    texts = pa.array(["infinity", "0044-03-15 00:00:00 BC", None])
    assert typed(of, AS_STRING).parse(texts).equals(texts)
    assert typed(column(TIMESTAMPTZ), AS_STRING).lake_type == pa.timestamp("us", "UTC")


@pytest.mark.parametrize("text_type", [pa.string(), pa.large_string()])
@pytest.mark.parametrize(
    ("of", "texts", "expected"),
    [
        (column(INT4), ["1", None, "-2147483648"], [1, None, -(2**31)]),
        (column(BOOL), ["t", None, "f"], [True, None, False]),
        (column(BYTEA), ["\\x00ff", None, "\\x", "\\x0a"], [b"\x00\xff", None, b"", b"\n"]),
        (numeric(10, 2), ["1.20", None, "-0.01"], [Decimal("1.20"), None, Decimal("-0.01")]),
        (column(TEXT), ["a", None, ""], ["a", None, ""]),
    ],
)
def test_slices_chunks_and_large_strings_are_typed_alike(text_type, of, texts, expected):
    padded = pa.array([texts[0], *texts, texts[0]], text_type)
    assert typed(of).parse(padded.slice(1, len(texts))).to_pylist() == expected
    chunks = pa.chunked_array([padded.slice(1, 1), padded.slice(2, len(texts) - 1)])
    parsed = typed(of).parse(chunks)
    assert isinstance(parsed, pa.Array)
    assert parsed.to_pylist() == expected


@pytest.mark.parametrize(
    ("of", "text", "said"),
    [
        (numeric(10, 2), "NaN", "NaN or infinity"),
        (numeric(10, 2), "-Infinity", "NaN or infinity"),
        (numeric(10, 2), "98765432100", "does not write"),
        (numeric(10, 2), "9876.543", "does not write"),
        (column(DATE), "infinity", "infinity"),
        (column(TIMESTAMP), "-infinity", "infinity"),
        (column(TIMESTAMPTZ), "294247-01-10 04:00:54.775808+00", "after 294247"),
        (column(TIMESTAMPTZ), "294276-12-31 23:59:59.999999+00", "after 294247"),
        (column(TIMESTAMPTZ), "12024-01-01 00:00:00+01", "does not write"),
        (column(DATE), "12024-13-01", "does not write"),
        (column(DATE), "9876/54/32", "does not write"),
        (column(INT2), "98765", "does not write"),
        (column(INT4), "", "does not write"),
        (column(FLOAT8), "98.76.5", "does not write"),
        (column(BOOL), "98765", "does not write"),
        (column(MONEY), "-9.876,50 €", "does not write"),
        (column(MONEY), "$9876.54", "does not write"),
        (column(MONEY), "$987,654,321,987,654,321.98", "does not write"),
        (column(OID), "-98.5", "does not write"),
        (column(XID8), "9" * 45, "does not write"),
        (column(BYTEA), "98765", "does not write"),
        (column(BYTEA), "\\x98765", "does not write"),
        (column(BYTEA), "\\x9876\\x5", "does not write"),
        (column(BYTEA), "\\x9876zz", "does not write"),
    ],
)
def test_a_value_that_the_lake_type_cannot_hold_is_named_but_never_shown(of, text, said):
    with pytest.raises(ValueRangeError) as caught:
        typed(of).parse(pa.array([None, text]))
    assert f'column "c" of sales.orders ({of.type_name})' in caught.value.message
    assert said in caught.value.message
    assert caught.value.hint
    shown = "".join(traceback.format_exception(caught.value))
    assert text in ("", "infinity", "NaN") or text.strip("-") not in shown or text == "-infinity"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


CHOSEN = "decimal(38,2)"


def with_types(of, lake_type, **options):
    pipeline = Pipeline(
        name="p", lake="/lake", tables=("public.t",), types={"sales.orders.c": lake_type}, **options
    )
    return typed(of, pipeline)


@pytest.mark.parametrize("text", [str(2**128 + 5), "1" * 37, "9" * 60, "0." + "0" * 60 + "1", "9.876"])
def test_a_number_that_the_chosen_decimal_cannot_hold_is_refused_with_what_to_choose(text):
    with pytest.raises(ValueRangeError, match="more than 36 digits before the point or 2 after it") as caught:
        with_types(column(NUMERIC), CHOSEN).parse(pa.array([None, "1", text]))
    assert text not in str(caught.value)
    assert "a decimal that holds it, or string" in caught.value.hint
    assert "pgrepl snapshot FILE.json --tables 'sales.orders'" in caught.value.hint


def test_malformed_number_is_not_reported_as_too_wide():
    with pytest.raises(ValueRangeError, match="does not write"):
        with_types(column(NUMERIC), CHOSEN).parse(pa.array(["9" * 60, "98,76"]))


@pytest.mark.parametrize(
    "text", ["1.2300", "1.23" + "0" * 60, "-0." + "0" * 60, "9" * 36 + ".99", "-" + "9" * 36 + ".990"]
)
def test_zeros_at_the_end_are_not_too_many_digits(text):
    (number,) = with_types(column(NUMERIC), CHOSEN).parse(pa.array([text])).to_pylist()
    assert number == Decimal(text)


def test_numbers_that_are_not_finite_are_null_where_the_pipeline_says_so():
    texts = pa.array(["NaN", "1.5", None, "9" * 36 + ".5", "-Infinity", "Infinity"])
    parsed = with_types(column(NUMERIC), CHOSEN, numeric_nan="null").parse(texts)
    assert parsed.to_pylist() == [None, Decimal("1.50"), None, Decimal("9" * 36 + ".50"), None, None]


def test_numbers_and_infinities_of_a_key_stay_exact_whatever_the_pipeline_says():
    lenient = Pipeline(name="p", lake="/lake", tables=("public.t",), infinity="sentinel", numeric_nan="null")
    for of, text in ((numeric(10, 2), "NaN"), (column(DATE), "infinity"), (column(TIMESTAMPTZ), "-infinity")):
        assert typed(of, lenient).parse(pa.array([text])) is not None
        with pytest.raises(ValueRangeError):
            typed(replace(of, is_key=True), lenient).parse(pa.array([text]))


@pytest.mark.parametrize("of", [column(INT4), column(TEXT), column(FLOAT8), column(DATE), column(OID)])
def test_a_decimal_is_only_for_numbers_that_are_decimal(of):
    with pytest.raises(ConfigError, match=r"column c of type .* only numeric and money can") as caught:
        with_types(of, CHOSEN)
    assert "string" in caught.value.hint


def test_the_csv_reader_types_only_what_it_reads_as_parse_does():
    lenient = Pipeline(name="p", lake="/lake", tables=("public.t",), infinity="null", numeric_nan="null")
    assert with_types(column(NUMERIC), CHOSEN).csv_type is None
    assert with_types(numeric(10, 2), "decimal(10,2)").csv_type is None
    for of in (numeric(10, 2), column(DATE), column(TIMESTAMP), column(TIMESTAMPTZ)):
        assert typed(of).csv_type == typed(of).lake_type
        assert typed(of, lenient).csv_type is None


def test_two_halves_of_bytes_do_not_make_a_whole_one():
    with pytest.raises(ValueRangeError):
        typed(column(BYTEA)).parse(pa.array(["\\x0", "\\x1"]))


def test_the_last_microsecond_that_the_lake_can_hold_is_held():
    last = typed(column(TIMESTAMPTZ)).parse(pa.array(["294247-01-10 04:00:54.775807+00"]))
    assert last.cast(pa.int64()).to_pylist() == [2**63 - 1]


def test_odd_dates_among_ordinary_ones_stay_in_their_rows():
    texts = pa.array([None, "2024-01-01", "0001-01-01 BC", None, "10000-01-01", "1970-01-02"])
    days = typed(column(DATE)).parse(texts).cast(pa.int32()).to_pylist()
    assert days == [None, 19723, -719528, None, 2932897, 1]


def test_the_lake_schema_is_the_columns_and_then_the_bookkeeping_that_is_wanted():
    relation = Relation(1, TableName("public", "t"), (column(INT8, name="id"), column(TEXT, name="s")))
    assert lake_schema(relation, PIPELINE.options(relation.table)) == pa.schema(
        [
            ("id", pa.int64()),
            ("s", pa.string()),
            ("_pgrepl_commit_lsn", pa.int64()),
            ("_pgrepl_commit_ts", pa.timestamp("us", "UTC")),
        ]
    )
    assert lake_schema(relation, BARE.options(relation.table)).names == ["id", "s"]


def test_a_column_with_the_name_of_one_of_the_lakes_own_is_refused_with_its_setting():
    relation = Relation(1, TableName("public", "t"), (column(TEXT, name="_PGREPL_COMMIT_LSN"),))
    with pytest.raises(TableError, match="column _pgrepl_commit_lsn has the name of") as caught:
        lake_schema(relation, PIPELINE.options(relation.table))
    assert "set commit_lsn_column to false" in caught.value.hint


@pytest.mark.parametrize("names", [("A", "a"), ("x", "X")])
def test_names_that_the_lake_cannot_tell_apart_are_refused(names):
    relation = Relation(1, TableName("public", "t"), tuple(column(TEXT, name=name) for name in names))
    with pytest.raises(TableError, match=f'public.t.*"{names[-1]}"'):
        lake_schema(relation, PIPELINE.options(relation.table))
