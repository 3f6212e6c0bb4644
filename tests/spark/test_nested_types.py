"""Types of extensions, and types made of types, from Debian's server through both apps."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from deltalake import QueryBuilder

from airflow_provider_pgrepl.replication.lake.delta.table import open_table
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.source.catalog.relations import find_relation
from tests.support.in_process import InProcess
from tests.support.rendered import lake_texts, source_texts
from tests.support.replicated import execute

# Long enough, and random enough, to be stored outside its row, where an update of another column leaves it.
_LONG = "(select string_agg(md5(random()::text), '') from generate_series(1, 200))"
SETUP = (
    'create type part as ("Name x" text, sizes numeric(8,2)[], "at.x" timestamp)',
    "create type mood as enum ('sad', 'so \"so\"')",
    "create domain tags as citext[]",
    "create table nested (id int primary key, n int, h hstore, c citext, geom geometry, geog geography,"
    " l ltree, q cube, s seg, i isbn, p part, ps part[], m mood[], d tags, r tstzrange, mr int8multirange,"
    " grid int[], big text[], bigh hstore, boxes box[], j jsonb[])",
)
_ROW = f"""
    'a=>1, "b \\" c"=>NULL', 'MiXed', 'SRID=4326;POINT(1 2)', 'LINESTRING(0 0, 1 1)', 'a.b.c',
    '(1,2),(3,4)', '1 .. 2', '978-0-393-04002-9',
    row('x "y", z', '{{1.5,NULL}}', '2024-01-01 12:00')::part, array[row('', null, null)::part, null],
    '{{sad,"so \\"so\\"",NULL}}', '{{A,"b c"}}', '[2024-01-01,2024-02-01)', '{{[1,3),[7,)}}',
    '{{{{1,2}},{{3,NULL}}}}', array[{_LONG}, null], hstore('k', {_LONG}),
    array[box '(1,1),(0,0)', null], array['{{"a": [1]}}'::jsonb, null]"""
INSERT = "insert into nested select g, g, {row} from generate_series({first}, {last}) g"


def rows(replicated: InProcess) -> dict[str, tuple[list[str | None], list[str | None]]]:
    """Return by column the source's values, and the lake's, as texts that the source makes of both."""
    table = open_table(replicated.lake_path("public.nested"))
    lake = pa.table(QueryBuilder().register("t", table).execute("select * from t order by id").read_all())
    with replicated.source() as source:
        relation = find_relation(source, TableName("public", "nested"))
        assert relation is not None
        with source.cursor() as cursor:
            cursor.execute(
                "set search_path to public"
            )  # the texts of PostGIS's types are cast by its own casts
        return {
            column.name: (
                source_texts(source, column, "public.nested"),
                lake_texts(source, column, lake[column.name]),
            )
            for column in relation.columns
        }


def assert_equal(replicated: InProcess) -> None:
    for name, (source, lake) in rows(replicated).items():
        assert source == lake, name


@pytest.mark.thorough("property/test_nested_values, integration/test_large_types")
def test_copied_streamed_merged_and_read_by_spark(spark, debian_dsn, tmp_path):
    execute(debian_dsn, *SETUP, INSERT.format(row=_ROW, first=1, last=4), "insert into nested values (5)")
    tables = ("public.nested",)
    replicated = InProcess(spark, debian_dsn, tmp_path, tables, types={"public.nested.grid": "array(2)"})
    replicated.snapshot()
    assert_equal(replicated)
    execute(
        debian_dsn,
        INSERT.format(row=_ROW, first=10, last=12),
        "update nested set n = -n where id in (1, 2)",
        "update nested set id = 20 where id = 2",
        "update nested set h = h || 'z=>9', geom = null, ps = '{}', r = 'empty' where id = 3",
        "update nested set mr = '{}', grid = '{}' where id = 3",
        "delete from nested where id = 4",
        "update nested set (h, p, ps, big) = (select h, p, ps, big from nested where id = 1) where id = 5",
    )
    replicated.catch_up()
    assert_equal(replicated)
    read = read_by_spark(spark, replicated)
    assert read[1]["h"] == {"a": "1", 'b " c': None}
    assert read[1]["p"]["Name x"] == 'x "y", z'
    assert read[1]["grid"] == [[1, 2], [3, None]]
    assert read[3]["r"]["empty"] is True
    assert bytes(read[1]["geom"])[:5] == b"\x01\x01\x00\x00\x20"
    assert all(len(read[number]["big"][0]) == 6400 for number in (1, 20, 5))


def read_by_spark(spark: Any, replicated: InProcess) -> dict[int, Any]:
    frame = spark.read.format("delta").load(replicated.lake_path("public.nested"))
    return {row["id"]: row.asDict(recursive=True) for row in frame.collect()}
