"""Spark finds in a lake table, by whatever condition, the rows that PostgreSQL finds."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake
from pyspark.sql import SparkSession

from tests.support import every_type
from tests.support.handed import Handed
from tests.support.marked_table import FILES, MarkedTable, Row
from tests.support.readers import Condition, sql_of
from tests.support.written_tables import T, merged, widened

WITH_BOUNDS = ("c_int32", "c_date", "c_tz")
"""Each reading costs Spark half a second: other columns get one comparison each."""


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(
            merged, marks=pytest.mark.thorough("the same test, widened; integration/test_readers.py, merged")
        ),
        widened,
    ],
)
@pytest.mark.thorough("integration/test_readers, with four readers")
def test_spark_finds_rows_by_each_type(
    spark: SparkSession, dsn: str, tmp_path: Path, written: Callable[[str, Path], Handed]
) -> None:
    lake = written(dsn, tmp_path)
    conditions = [condition for condition in every_type.conditions() if is_chosen(*condition)]
    with lake.source() as source:
        expected = [every_type.ids_in(source, condition) for condition in conditions]
    found = ids_by_condition(spark, lake.lake_path(T), conditions)
    assert list(zip(conditions, found, strict=True)) == list(zip(conditions, expected, strict=True))


@pytest.mark.thorough("unit/test_large_deletion_vectors; fault/test_kill reads such tables by Spark")
def test_spark_reads_a_large_table_with_deletion_vectors_exactly(spark: SparkSession, tmp_path: Path) -> None:
    table = MarkedTable(tmp_path)
    assert table.marked_files() == FILES
    spark.read.format("delta").load(table.uri).createOrReplaceTempView("t")

    def read(query: str) -> list[Row]:
        return [tuple(row) for row in spark.sql(query).collect()]

    assert table.wrong(read) == []


@pytest.mark.thorough("none: it tests Spark alone, of which docs/reference/reading.md warns")
def test_spark_finds_no_date_that_the_gregorian_calendar_skipped_unless_set_up_for_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The first case fails once Spark has repaired this: take the paragraph out of the page then."""
    uri = str(tmp_path / "t")
    write_deltalake(uri, pa.table({"d": pa.array([date(1582, 10, 10), date(1582, 10, 20)])}))
    for settings, found in (
        ({}, 0),
        ({"spark.sql.datetime.java8API.enabled": "true"}, 1),
        ({"spark.sql.parquet.filterPushdown": "false"}, 1),
    ):
        session = spark.newSession()
        for name, value in settings.items():
            session.conf.set(name, value)
        table = session.read.format("delta").load(uri)
        assert table.count() == 2, settings
        assert table.where("d = date'1582-10-10'").count() == found, settings
        assert table.where("d = date'1582-10-20'").count() == 1, settings


def is_chosen(column: str, operator: str, text: str) -> bool:
    if column in WITH_BOUNDS:
        return True
    return operator == "is null" or (operator == "=" and text == every_type.PLAIN[column][1])


def ids_by_condition(spark: SparkSession, uri: str, conditions: list[Condition]) -> list[list[int]]:
    """All in one job."""
    rows = spark.read.format("delta").load(uri)
    rows.createOrReplaceTempView("t")
    types = dict(rows.dtypes)

    def literal(column: str, text: str) -> str:
        return f"X'{text}'" if types[column] == "binary" else f"cast('{text}' as {types[column]})"

    selects = [
        f"select {number} n, id from t where {sql_of(condition, literal)}"
        for number, condition in enumerate(conditions)
    ]
    found = spark.sql(" union all ".join(selects)).collect()
    return [sorted(row.id for row in found if row.n == number) for number in range(len(conditions))]
