"""A pipeline's options for decimals and infinities; no value is ever changed without an error."""

from __future__ import annotations

import io
import re
from contextlib import closing
from decimal import Decimal, localcontext
from pathlib import Path

import psycopg2
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import ValueRangeError
from airflow_provider_pgrepl.replication.lake.snapshot.csv import CsvTypeError, read_csv
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.values import typed_column
from tests.support.examples import examples
from tests.support.scalar_table import by_csv, by_parse, create, fill, shown, texts_of
from tests.support.scalar_types import CASES, Case

TABLE = TableName("public", "t")
NUMERIC, MONEY = 1700, 790
INFINITIES = ("infinity", "-infinity")
SENTINELS = {
    "date": ("9999-12-31", "0001-01-01"),
    "timestamp": ("9999-12-31 23:59:59.999999", "0001-01-01 00:00:00"),
    "timestamptz": ("9999-12-31 23:59:59.999999+00", "0001-01-01 00:00:00+00"),
}
DIALECTS = {
    "datestyle": "German, DMY",
    "intervalstyle": "iso_8601",
    "timezone": "Asia/Kathmandu",
    "extra_float_digits": "-5",
    "bytea_output": "escape",
    "client_encoding": "LATIN1",
    "quote_all_identifiers": "on",
}
# A value of each type that these settings change the text of.
SPOKEN_DIFFERENTLY = {
    "date": "2024-02-29",
    "timestamp": "2024-02-29 23:59:59.5",
    "timestamptz": "2024-02-29 23:59:59.5+00",
    "tstzrange": "[2024-02-29 23:59:59.5+00,)",
    "interval": "1 year 2 mons -3 days 00:00:01.5",
    "double precision": "0.1234567890123456",
    "real": "0.12345678",
    "point": "(0.1234567890123456,1)",
    "bytea": "\\x00ff",
    "regclass": "pg_class",
}
# Without types whose values no client can write: parts of the planner's statistics, expression trees.
BUILT_IN_SCALARS = """
    select array_agg(oid::int) from pg_type where typnamespace = 'pg_catalog'::regnamespace and typtype = 'b'
    and (typcategory <> 'A' or typname in ('int2vector', 'oidvector'))
    and (typcategory <> 'Z' or typname = 'char') and typname <> 'gtsvector'
"""


def pipeline(**options):
    return Pipeline(name="p", lake="/lake", tables=("public.t",), **options)


@st.composite
def decimals(draw):
    """Draw precision and scale of a decimal."""
    precision = draw(st.integers(1, 38))
    return precision, draw(st.integers(0, precision))


@st.composite
def numerics(draw):
    """Draw a numeric as PostgreSQL writes it, with up to 45 digits on each side of the point, often zeros."""
    digits = st.integers(0, 45).flatmap(
        lambda length: st.text("0123456789", min_size=length, max_size=length) | st.just("0" * length)
    )
    whole = draw(digits).lstrip("0") or "0"
    fraction = draw(digits) + "0" * draw(st.integers(0, 45))
    text = f"{whole}.{fraction}" if fraction else whole
    return f"-{text}" if text.strip("0.") and draw(st.booleans()) else text


def fits(text, precision, scale):
    """Return True if a decimal of this precision and scale can hold the number exactly."""
    whole, _, fraction = text.lstrip("-").partition(".")
    return len(whole.lstrip("0")) <= precision - scale and not fraction[scale:].strip("0")


def exact(text):
    with localcontext(prec=200):
        return Decimal(text)


@examples(150)
@given(decimals(), st.lists(st.none() | numerics(), min_size=1, max_size=4), st.booleans(), st.booleans())
def test_a_number_is_the_same_in_the_lake_or_refused(lake_type, texts, is_declared, is_large):
    precision, scale = lake_type
    typmod = ((precision << 16) | scale) + 4 if is_declared else -1
    types = {} if is_declared else {"public.t.c": f"decimal({precision},{scale})"}
    typed = typed_column(
        Column("c", 1, NUMERIC, typmod, "numeric"), TABLE, pipeline(types=types).options(TABLE)
    )
    array = pa.array(texts, pa.large_string() if is_large else pa.string())
    if all(text is None or fits(text, precision, scale) for text in texts):
        numbers = typed.parse(array)
        assert numbers.type == pa.decimal128(precision, scale)
        assert numbers.to_pylist() == [None if text is None else exact(text) for text in texts]
    else:
        with pytest.raises(ValueRangeError, match="does not write" if is_declared else "digits before the"):
            typed.parse(array)


@examples(100)
@given(st.integers(0, 38), st.lists(numerics(), min_size=1, max_size=4))
def test_a_copy_takes_the_numbers_that_the_stream_takes(scale, texts):
    chosen = pipeline(unconstrained_numeric=f"decimal(38,{scale})")
    relation = Relation(1, TABLE, (Column("c", 1, NUMERIC, -1, "numeric"),))
    copied = io.BytesIO("".join(f"{text}\n" for text in texts).encode())
    if all(fits(text, 38, scale) for text in texts):
        (batch,) = read_csv(copied, relation, chosen.options(relation.table))
        assert batch.column(0).to_pylist() == [exact(text) for text in texts]
    else:
        with pytest.raises(ValueRangeError):
            list(read_csv(copied, relation, chosen.options(relation.table)))


@examples(100)
@given(decimals(), st.integers(-(2**63), 2**63 - 1))
def test_money_is_the_same_in_another_decimal_or_refused(lake_type, hundredths):
    precision, scale = lake_type
    types = {"public.t.c": f"decimal({precision},{scale})"}
    typed = typed_column(Column("c", 1, MONEY, -1, "money"), TABLE, pipeline(types=types).options(TABLE))
    amount = Decimal(hundredths) / 100
    text = pa.array([f"{'-' if amount < 0 else ''}${abs(amount):,.2f}"])
    if fits(f"{amount:.2f}", precision, scale):
        assert typed.parse(text).to_pylist() == [amount]
    else:
        with pytest.raises(ValueRangeError):
            typed.parse(text)


@pytest.mark.parametrize("type_sql", SENTINELS)
@pytest.mark.parametrize("infinity", ["error", "null", "sentinel"])
def test_infinities_become_what_the_pipeline_chose_and_all_else_stays(source, type_sql, infinity):
    case = next(case for case in CASES if case.type_sql == type_sql)
    relation = create(source, [case])
    chosen = pipeline(infinity=infinity)
    stand_ins = SENTINELS[type_sql] if infinity == "sentinel" else (None, None)
    instead = dict(zip(INFINITIES, stand_ins, strict=True))

    @examples(15)
    @given(st.lists(st.none() | case.inputs, max_size=6), st.lists(st.sampled_from(INFINITIES), max_size=3))
    def check(inputs, infinities):
        fill(source, [case], [[text] for text in inputs])
        with source.cursor() as cursor:
            for text in infinities:
                cursor.execute("insert into public.t values (%s)", (text,))
        texts = texts_of(source)
        if infinities and infinity == "error":
            with pytest.raises(ValueRangeError, match="infinity"):
                by_parse(relation, chosen, texts)
            with pytest.raises(ValueRangeError, match="infinity"):
                by_csv(source, relation, chosen, as_text=True)
            with pytest.raises(CsvTypeError):
                by_csv(source, relation, chosen, as_text=False)
            return
        expected = [instead.get(text, text) for (text,) in texts]
        ways = [by_parse(relation, chosen, texts), by_csv(source, relation, chosen, as_text=True)]
        if infinity != "error":
            ways.append(by_csv(source, relation, chosen, as_text=False))
        for table in ways:
            assert shown(source, case, table.column(0)) == expected

    check()


def test_values_are_the_same_whatever_database_and_role_are_set_to(dsn):
    cases = [Case(type_sql, st.just(text)) for type_sql, text in SPOKEN_DIFFERENTLY.items()]
    with closing(connect(dsn, "test")) as source, source.cursor() as cursor:
        relation = create(source, cases)
        fill(source, cases, [list(SPOKEN_DIFFERENTLY.values())])
        before = texts_of(source), by_csv(source, relation, pipeline(), as_text=False)
        cursor.execute("select current_database(), current_user")
        database, role = cursor.fetchone()
        for name, value in DIALECTS.items():
            cursor.execute(f'alter database "{database}" set {name} = {value!r}')
            cursor.execute(f'alter role "{role}" in database "{database}" set {name} = {value!r}')
    with closing(psycopg2.connect(dsn)) as careless:
        pairs = zip(SPOKEN_DIFFERENTLY, texts_of(careless)[0], before[0][0], strict=True)
        # psycopg2 itself asks for ISO dates.
        assert {type_sql for type_sql, theirs, ours in pairs if theirs == ours} == {"date", "timestamp"}
    with closing(connect(dsn, "test")) as other:
        assert (texts_of(other), by_csv(other, relation, pipeline(), as_text=False)) == before


def test_every_type_that_postgresql_has_built_in_is_in_the_list_of_types(source):
    with source.cursor() as cursor:
        cursor.execute(BUILT_IN_SCALARS)
        (oids,) = cursor.fetchone()
    page = Path(__file__).parents[2] / "docs" / "reference" / "types.md"
    listed = {
        int(oid) for oid in re.findall(r"^\| `[^`]+` \| (\d+) \|", page.read_text("utf-8"), re.MULTILINE)
    }
    assert set(oids) <= listed
    assert {NUMERIC, MONEY} <= set(oids)
