"""lake/read.py through Spark."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.errors import LakeError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow, consistent_read
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def move(lake: Path, lsn: int, amount: int) -> None:
    """One source transaction over two tables, and the consistent point after it."""
    versions = {}
    for table, value in (("public.debit", -amount), ('"My Shop"."a/b%"', amount)):
        uri = f"{lake}/{TableName.parse(table).path}"
        write_deltalake(uri, pa.table({"amount": pa.array([value], pa.int64())}), mode="append")
        versions[table] = DeltaTable(uri).version()
    ConsistentPoints(str(lake)).append(ConsistentPoint(1, LSN(lsn), datetime.now(UTC), versions))


@pytest.mark.thorough("test_invariants reads at every point")
def test_both_sides_of_a_transaction_or_none_are_read(spark: SparkSession, tmp_path: Path) -> None:
    move(tmp_path, 10, 5)
    move(tmp_path, 20, 7)
    half = pa.table({"amount": pa.array([1000], pa.int64())})
    write_deltalake(f"{tmp_path}/public/debit", half, mode="append")
    for lsn, total in ((None, 12), (15, 5)):
        view = consistent_read(spark, str(tmp_path), lsn)
        assert view.table("public.debit").agg({"amount": "sum"}).first()[0] == -total
        assert view.table('"My Shop"."a/b%"').agg({"amount": "sum"}).first()[0] == total
        same = consistent_arrow(str(tmp_path), lsn).table("public.debit")
        assert sorted(same["amount"].to_pylist()) == sorted(
            row["amount"] for row in view.table("public.debit").collect()
        )


@pytest.mark.thorough("integration/test_reading_as_of: a table that the nearest point does not name")
def test_a_table_that_the_point_does_not_name_raises(spark: SparkSession, tmp_path: Path) -> None:
    move(tmp_path, 10, 5)
    write_deltalake(f"{tmp_path}/public/other", pa.table({"n": [1]}))
    with pytest.raises(LakeError, match=r"does not hold public\.other"):
        consistent_read(spark, str(tmp_path)).table("public.other")


def test_a_version_that_is_gone_raises_instead_of_reading_another(
    spark: SparkSession, tmp_path: Path
) -> None:
    move(tmp_path, 10, 5)
    ConsistentPoints(str(tmp_path)).append(ConsistentPoint(1, LSN(20), None, {"public.debit": 99}))
    with pytest.raises(LakeError, match=r"version 99 of public\.debit"):
        consistent_read(spark, str(tmp_path)).table("public.debit")
