"""The readers that reference/lake-layout.md calls tested read a large table with deletion vectors exactly."""

from __future__ import annotations

from functools import partial

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from duckdb_extensions import import_extension

from airflow_provider_pgrepl.replication.delta.table import query_delta
from tests.support.marked_table import FILES, MarkedTable, Row

pytestmark = pytest.mark.slow

MORE_PARTITIONS = [
    pytest.param(number, marks=pytest.mark.thorough("the same test, with 3")) for number in range(4, 8)
]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> MarkedTable:
    return MarkedTable(tmp_path_factory.mktemp("marked"))


def by_datafusion(uri: str, settings: dict[str, str], query: str) -> list[Row]:
    builder = QueryBuilder(settings).register("t", DeltaTable(uri))
    return rows_of(pa.table(builder.execute(query).read_all()))


def by_product(uri: str, query: str) -> list[Row]:
    return rows_of(
        query_delta(DeltaTable(uri), query.replace("from t", "from it").replace("join t", "join it"))
    )


def by_duckdb(connection: duckdb.DuckDBPyConnection, query: str) -> list[Row]:
    return [tuple(map(int, row)) for row in connection.execute(query).fetchall()]


def by_polars(uri: str, query: str) -> list[Row]:
    return pl.SQLContext(t=pl.scan_delta(uri)).execute(query).collect().rows()


def rows_of(found: pa.Table) -> list[Row]:
    return list(zip(*(column.to_pylist() for column in found.columns), strict=True))


def test_every_file_of_the_snapshot_has_a_vector(table: MarkedTable) -> None:
    assert table.marked_files() == FILES


@pytest.mark.parametrize("pushdown", ["true", "false"])
@pytest.mark.parametrize("partitions", [1, 2, 3, 8, *MORE_PARTITIONS])
def test_datafusion_reads_marked_rows_exactly_in_any_number_of_partitions(
    table: MarkedTable, partitions: int, pushdown: str
) -> None:
    settings = {
        "datafusion.execution.target_partitions": str(partitions),
        "datafusion.execution.parquet.pushdown_filters": pushdown,
    }
    assert table.wrong(partial(by_datafusion, table.uri, settings)) == []


def test_queries_of_this_package_read_marked_rows_exactly(table: MarkedTable) -> None:
    assert table.wrong(partial(by_product, table.uri)) == []


@pytest.mark.parametrize("threads", [1, 8])
def test_duckdb_reads_marked_rows_exactly(table: MarkedTable, threads: int) -> None:
    with duckdb.connect() as connection:
        import_extension("delta", con=connection)
        view = f"create view t as from delta_scan('{table.uri}')"
        connection.execute(f"load delta; set threads = {threads}; {view}")
        assert table.wrong(partial(by_duckdb, connection)) == []


def test_polars_reads_marked_rows_exactly(table: MarkedTable) -> None:
    assert table.wrong(partial(by_polars, table.uri)) == []
