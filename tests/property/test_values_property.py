"""PostgreSQL says what a value is: whatever it writes comes back from the lake's value, by both ways in."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from datetime import date
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication import values
from airflow_provider_pgrepl.replication.lake.snapshot.csv import CsvTypeError, whole_rows
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.values.temporal import days_since_epoch
from tests.support.examples import examples
from tests.support.rendered import written
from tests.support.scalar_table import by_csv, by_parse, create, fill, shown, texts_of
from tests.support.scalar_types import CASES, Case

PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.t",))


def _check(
    source: Any, relation: Relation, cases: Sequence[Case], rows: Sequence[Sequence[str | None]]
) -> None:
    fill(source, cases, rows)
    texts = texts_of(source)
    ways = [by_parse(relation, PIPELINE, texts), by_csv(source, relation, PIPELINE, as_text=True)]
    try:
        ways.append(by_csv(source, relation, PIPELINE, as_text=False))
    except CsvTypeError:
        assert any(_is_odd(text) for row in texts for text in row)
    for table in ways:
        for index, case in enumerate(cases):
            assert (
                table.column(index).type
                == values.typed_columns(relation, PIPELINE.options(relation.table))[index].lake_type
            )
            expected = [row[index] for row in texts]
            assert shown(source, case, table.column(index)) == expected
            assert written(table.column(index), relation.columns[index]) == expected


def _is_odd(text: str | None) -> bool:
    """Return True if the text may be a date that pyarrow cannot read: before Christ, or after 9999."""
    return text is not None and re.search(r" BC$|^\d{5,}-", text) is not None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.type_sql)
def test_a_column_of_any_type_comes_back_as_postgresql_writes_it(source, case):
    relation = create(source, [case])

    @examples(15)
    @given(st.lists(st.none() | case.inputs, max_size=12))
    def check(inputs):
        _check(source, relation, [case], [[text] for text in inputs])

    check()


def test_rows_of_all_types_come_back_as_postgresql_writes_them(source):
    relation = create(source, CASES)

    @examples(5)
    @given(st.lists(st.tuples(*(st.none() | case.inputs for case in CASES)), max_size=4))
    def check(rows):
        _check(source, relation, CASES, rows)

    check()


@examples(100)
@given(st.dates())
def test_the_calendar_agrees_with_pythons_where_that_reaches(day):
    fields = (np.array([number]) for number in (day.year, day.month, day.day))
    assert days_since_epoch(*fields)[0] == (day - date(1970, 1, 1)).days


@examples(100)
@given(st.lists(st.text('x\n"', max_size=9), max_size=30), st.integers(1, 40))
def test_pieces_of_any_size_are_whole_rows_and_together_the_stream(texts, block_bytes):
    rows = [b'"%s"\n' % text.replace('"', '""').encode() for text in texts]
    pieces = list(whole_rows(io.BytesIO(b"".join(rows)), block_bytes))
    assert b"".join(pieces) == b"".join(rows)
    ends = {sum(map(len, rows[: index + 1])) for index in range(len(rows))}
    assert {sum(map(len, pieces[: index + 1])) for index in range(len(pieces))} <= ends
