"""Rows are found by their keys in data files, whatever bounds the files or their row groups record."""

from __future__ import annotations

import datetime
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, WriterProperties, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.replication.lake.files import row_search
from airflow_provider_pgrepl.replication.lake.files import row_search as search
from airflow_provider_pgrepl.replication.lake.files.row_search import FileRows
from tests.support.examples import examples

# Longer than what writers keep of a bound, up to the greatest character, which no bound can be greater than.
texts = st.text(st.sampled_from("a\x7f\xe9z\uffff\U0010ffff"), max_size=3).map(
    lambda text: "same " * 14 + text
)
days = st.dates(datetime.date(1960, 1, 1), datetime.date(2030, 1, 1))
numbers = st.integers(-(2**63), 2**63 - 1) | st.integers(-5, 5)
KINDS = {
    "bigint": (pa.int64(), numbers),
    "text": (pa.string(), texts | st.text(max_size=3)),
    "date": (pa.date32(), days),
    "smallint": (pa.int16(), st.integers(-3, 3)),
}


@pytest.mark.parametrize(
    "names", [("bigint",), ("text",), ("date",), ("smallint", "text"), ("text", "bigint")]
)
@examples(60)
@given(data=st.data())
def test_all_rows_are_found_that_are_there_and_no_others(names, data):
    row = st.tuples(*(KINDS[name][1] for name in names))
    held = data.draw(st.lists(row, unique=True, min_size=1, max_size=40))
    wanted = data.draw(st.lists(st.sampled_from(held) | row, unique=True, max_size=10))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(held)), max_size=3)))
    schema = pa.schema([(f"k{number}", KINDS[name][0]) for number, name in enumerate(names)])
    with tempfile.TemporaryDirectory() as folder:
        uri = str(Path(folder) / "t")
        for start, end in zip([0, *cuts], [*cuts, len(held)], strict=True):
            if start < end:
                properties = WriterProperties(max_row_group_size=4)
                write_deltalake(
                    uri, table_of(held[start:end], schema), mode="append", writer_properties=properties
                )
        places = FileRows(DeltaTable(uri)).find(table_of(wanted, schema))
        found = FileRows(DeltaTable(uri)).rows(places, schema.names)
    expected = [wanted[number] for number in places.which]
    assert [tuple(one.values()) for one in found.to_pylist()] == expected
    assert sorted(map(str, expected)) == sorted(str(one) for one in wanted if one in held)


def test_files_of_other_texts_are_not_read(tmp_path, monkeypatch):
    """Texts that grow with time, as uuids of version 7 do, are looked for in the newest files alone."""
    uri, read = str(tmp_path / "t"), []
    for number in range(10):
        rows = pa.table({"k": [f"{number:02d}-{each:04d}" for each in range(1000)]})
        write_deltalake(uri, rows, mode="append")
    find_in = row_search.FileRows._find_in
    monkeypatch.setattr(
        row_search.FileRows, "_find_in", lambda self, *given: read.append(1) or find_in(self, *given)
    )
    assert len(FileRows(DeltaTable(uri)).find(pa.table({"k": ["09-0007", "09-0999"]}))) == 2
    assert len(read) == 1


def test_bounds_that_are_not_told_exclude_nothing():
    asked = search.Search(pa.table({"k": ["b"]}))
    assert asked.may_be_between({}, {})
    assert not asked.may_be_between({"k": b"c"}, {"k": b"d"})
    assert asked.may_be_between({"k": b"a"}, {"k": b"b"})


def table_of(rows: list[tuple[object, ...]], schema: pa.Schema) -> pa.Table:
    return pa.table(
        [pa.array([row[number] for row in rows], field.type) for number, field in enumerate(schema)], schema
    )
