"""source/copy/text_hashes.py and lake/verify/text_check.py: server and lake hash the same texts alike."""

from __future__ import annotations

import io
from contextlib import closing
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_provider_pgrepl.errors import TableError
from airflow_provider_pgrepl.replication.lake.verify.buckets import Buckets, Collection
from airflow_provider_pgrepl.replication.lake.verify.text_check import (
    TextReading,
    TextShape,
    text_shape_of,
)
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from airflow_provider_pgrepl.replication.source.connection import Connection, connect
from airflow_provider_pgrepl.replication.source.copy.copy_stream import CopyRange, plan_ranges
from demo.postgres import Server
from tests.support.encoded_database import encoded_database
from tests.support.examples import examples
from tests.support.scalar_table import by_csv, create, fill
from tests.support.scalar_types import CASES

_PIPELINE = Pipeline(name="p", lake="/lake", tables=("public.t",), text_columns=("public.t.c3",))
_RANGE_BYTES = 16_384


class _Reading(TextReading):
    """A reading at the current snapshot of a connection."""

    connection: Connection

    def _read(self, copy_range: CopyRange, names: list[str], types: dict[str, pa.DataType]) -> pa.Table:
        stream = io.BytesIO()
        with self.connection.cursor() as cursor:
            cursor.copy_expert(copy_range.sql, stream)
        return self._table(stream.getvalue(), names, types)


def _at_source(source: Connection, relation: Relation, collection: Collection) -> Any:
    reading = _Reading("", "", relation, _PIPELINE.options(relation.table), collection)
    object.__setattr__(reading, "connection", source)
    ranges = plan_ranges(source, relation, _RANGE_BYTES, selects=True)
    return collection.merge(reading._collect(part) for part in ranges)


def _in_lake(rows: pa.Table, collection: Collection) -> Any:
    collector = collection.begin()
    for batch in rows.to_batches(max_chunksize=3):
        collector.add(batch)
    return collection.merge([collector.result])


def _check(source: Connection, relation: Relation, shape: TextShape) -> None:
    """Compare the sums of both sides, and the hashes of the rows of some buckets."""
    rows = by_csv(source, relation, _PIPELINE, as_text=True)
    plain = Buckets(np.arange(4))
    finer = Buckets(np.array([-1, 1, -1, 0]), 8)
    for buckets in (plain, finer):
        sums = Collection(shape, buckets)
        ours, theirs = _in_lake(rows, sums), _at_source(source, relation, sums)
        assert not len(ours.differing(theirs))
    assert _at_source(source, relation, Collection(shape, plain)).rows == rows.num_rows
    for buckets in (plain, finer):
        wanted = np.arange(buckets.count) % 2 == 1
        listed = Collection(shape, buckets, wanted)
        ours, theirs = _in_lake(rows, listed), _at_source(source, relation, listed)
        assert _sorted(ours) == _sorted(theirs)


def _sorted(rows: pa.Table | None) -> list[dict[str, Any]]:
    if rows is None:
        return []
    order = [(name, "ascending") for name in rows.column_names]
    return rows.select(sorted(rows.column_names)).sort_by(sorted(order)).to_pylist()


def _relation(source: Connection) -> Relation:
    found = find_relation(source, TableName("public", "t"))
    assert found is not None
    return found


def _made(source: Connection, *statements: str) -> Relation:
    with source.cursor() as cursor:
        for statement in ("drop table if exists public.t", *statements):
            cursor.execute(statement)
    return _relation(source)


def _shape(source: Connection, relation: Relation) -> TextShape:
    return text_shape_of(source, relation, _PIPELINE.options(relation.table))


def test_hash_of_rows_of_all_types_is_that_of_the_server(source: Connection) -> None:
    relation = create(source, CASES)

    @examples(30)
    @given(st.lists(st.tuples(*(st.none() | case.inputs for case in CASES)), max_size=8))
    def check(rows: list[tuple[str | None, ...]]) -> None:
        fill(source, CASES, rows)
        _check(source, relation, _shape(source, relation))

    check()


def test_hashes_of_table_with_key_of_several_columns_are_those_of_the_server(source: Connection) -> None:
    relation = _made(
        source,
        'create table public.t (v text, b text, "k, \'1" char(9), n int, primary key ("k, \'1", b))',
        "insert into public.t select nullif(repeat('ä', g), ''), g, g, g from generate_series(0, 200) g",
    )
    shape = _shape(source, relation)
    assert set(shape.keys) == {"k, '1", "b"}
    _check(source, relation, shape)


@pytest.mark.thorough("test_hash_of_rows_of_all_types_is_that_of_the_server")
def test_hashes_of_widest_table_are_those_of_the_server(source: Connection) -> None:
    columns = ", ".join(f"c{number} int" for number in range(1600))
    values = ", ".join(str(number) for number in range(0, 3200, 2))
    relation = _made(source, f"create table public.t ({columns})", f"insert into public.t values ({values})")
    _check(source, relation, _shape(source, relation))


def test_hashes_of_database_of_another_encoding_are_those_of_its_texts(server: Server) -> None:
    with encoded_database(server, "LATIN1") as dsn, closing(connect(dsn, "test")) as source:
        with source.cursor() as cursor:
            cursor.execute("insert into public.t values (1, 'Köln'), (2, 'Bonn'), (3, null)")
        relation = _relation(source)
        shape = _shape(source, relation)
        assert shape.as_hex
        _check(source, relation, shape)


def test_rows_with_the_same_values_in_other_places_have_other_hashes(source: Connection) -> None:
    """Values that move between rows or columns, or from NULL to an empty text, change the sums."""
    tables = ["(1, 'a', 'b'), (2, 'c', null)", "(1, 'b', 'a'), (2, 'c', null)"]
    tables += [
        "(1, 'c', 'b'), (2, 'a', null)",
        "(1, 'a', 'b'), (2, 'c', '')",
        "(1, 'ab', ''), (2, 'c', null)",
    ]
    relation = _made(source, "create table public.t (id int primary key, a text, b text)")
    sums, shape = set(), _shape(source, relation)
    for rows in tables:
        with source.cursor() as cursor:
            cursor.execute(f"truncate public.t; insert into public.t values {rows}")
        found = _at_source(source, relation, Collection(shape, Buckets(np.zeros(1, np.int64))))
        sums.add((int(found.s1[0]), int(found.counts[0])))
    assert len(sums) == len(tables)


def test_table_whose_key_has_no_text_in_the_lake_is_refused(source: Connection) -> None:
    relation = _made(source, "create table public.t (id numeric primary key, n int)")
    pipeline = Pipeline(name="p", lake="/lake", tables=("public.t",), unconstrained_numeric="decimal(38,2)")
    with pytest.raises(TableError, match="texts of its key"):
        text_shape_of(source, relation, pipeline.options(relation.table))
