"""lake/as_of.py and lake/views.py through Spark."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import psycopg2.extensions

from airflow_provider_pgrepl.replication.lake.as_of import arrow_view_as_of, as_of
from tests.integration.test_reading_as_of import SCHEMA, TABLES, Source, plain, rows_of
from tests.support.landed import Landed

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Connection = psycopg2.extensions.connection


def test_spark_shows_at_each_moment_what_the_source_did(
    spark: SparkSession, dsn: str, pg: Connection, tmp_path: Path
) -> None:
    pg.cursor().execute(SCHEMA)
    replicated = Landed(dsn, tmp_path, TABLES)
    replicated.begin()
    replicated.apply()
    source = Source(pg, seed=11)
    for _ in range(2):
        for _ in range(15):
            source.transaction()
        source.look()
        replicated.receive()
        assert [result.error for result in replicated.apply()] == [None] * len(TABLES)
        for _ in range(8):
            source.transaction()
        source.look()
        replicated.receive()
    for lsn, _, tables in source.seen:
        view = as_of(spark, replicated.pipeline, lsn=str(lsn))
        for table, rows in tables.items():
            assert plain(rows_of(view.table(table).toArrow())) == plain(rows), (table, lsn)
            exact = arrow_view_as_of(replicated.pipeline, lsn=str(lsn)).table(table)
            assert sorted(map(repr, view.table(table).toArrow().to_pylist())) == sorted(
                map(repr, exact.to_pylist())
            )
