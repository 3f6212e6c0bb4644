"""lake/read.py without a JVM, on real Delta tables."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import cast

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from airflow_provider_pgrepl.errors import ConfigError, LakeError, ToolError
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.lake.read import consistent_arrow, consistent_read
from airflow_provider_pgrepl.replication.lake.sql import sql_reader
from airflow_provider_pgrepl.replication.lake.time_travel.as_of import view_names
from airflow_provider_pgrepl.replication.postgres.lsn import LSN
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline


def write(lake: Path, table: str, data: pa.Table) -> int:
    uri = f"{lake}/{TableName.parse(table).path}"
    write_deltalake(uri, data, mode="append")
    version: int = DeltaTable(uri).version()
    return version


def pin(lake: Path, lsn: int, epoch: int = 1, **tables: int) -> None:
    named = {f"public.{name}": version for name, version in tables.items()}
    ConsistentPoints(str(lake)).append(ConsistentPoint(epoch, LSN(lsn), datetime.now(UTC), named))


def numbers(*values: int) -> pa.Table:
    return pa.table({"n": pa.array(values, pa.int64())})


def test_every_table_is_read_at_the_version_that_the_point_names(tmp_path: Path) -> None:
    pin(tmp_path, 10, a=write(tmp_path, "public.a", numbers(1)), b=write(tmp_path, "public.b", numbers(-1)))
    write(tmp_path, "public.a", numbers(2))
    view = consistent_arrow(str(tmp_path))
    assert view.point.lsn == 10
    assert view.tables == ("public.a", "public.b")
    assert view.table("public.a")["n"].to_pylist() == [1]
    both = "select (select sum(n) from public.a) + (select sum(n) from public.b) as total"
    assert view.sql(both).to_pylist() == [{"total": 0}]


def test_an_earlier_point_shows_the_earlier_state(tmp_path: Path) -> None:
    for lsn in (10, 20, 30):
        pin(tmp_path, lsn, a=write(tmp_path, "public.a", numbers(lsn)))
    earlier = consistent_arrow(str(tmp_path), lsn=25)
    assert sorted(earlier.table("public.a")["n"].to_pylist()) == [10, 20]
    assert consistent_arrow(str(tmp_path)).sql("select count(*) as n from public.a")["n"].to_pylist() == [3]


def test_a_point_of_an_older_epoch_is_read_only_when_asked_for(tmp_path: Path) -> None:
    pin(tmp_path, 900, epoch=1, a=write(tmp_path, "public.a", numbers(1)))
    pin(tmp_path, 5, epoch=2, a=write(tmp_path, "public.a", numbers(2)))
    assert consistent_arrow(str(tmp_path), lsn=950).point.epoch == 2
    assert consistent_arrow(str(tmp_path), epoch=1).table("public.a")["n"].to_pylist() == [1]
    with pytest.raises(LakeError, match="at or before 0/4 is kept in epoch 2"):
        consistent_arrow(str(tmp_path), lsn=4)


def test_types_come_back_as_the_lake_table_has_them(tmp_path: Path) -> None:
    data = pa.table(
        {
            "Text": pa.array(["ä", None]),
            "bytes": pa.array([b"\x00\xff", None]),
            "money": pa.array([Decimal("12.34"), None], pa.decimal128(12, 2)),
            "day": pa.array([date(1, 1, 1), None]),
            "local": pa.array([datetime(2020, 1, 1), None], pa.timestamp("us")),  # noqa: DTZ001
            "moment": pa.array([datetime(2020, 1, 1, tzinfo=UTC), None], pa.timestamp("us", "UTC")),
            "small": pa.array([1, None], pa.int16()),
        }
    )
    pin(tmp_path, 1, a=write(tmp_path, "public.a", data))
    view = consistent_arrow(str(tmp_path))
    assert view.table("public.a").equals(data)
    assert view.sql('select "Text" from public.a where "Text" is not null').schema.types == [pa.string()]


@pytest.mark.parametrize("name", ['"My Schema"."a.b/c%d"', '_hidden."quote""d"', "public.ünïcode"])
def test_odd_names_are_found_and_can_be_queried(tmp_path: Path, name: str) -> None:
    table = TableName.parse(name)
    key = str(table)
    version = write(tmp_path, name, numbers(4))
    write(tmp_path, name, numbers(5))
    ConsistentPoints(str(tmp_path)).append(ConsistentPoint(1, LSN(1), None, {key: version}))
    view = consistent_arrow(str(tmp_path))
    assert view.table(name)["n"].to_pylist() == [4]
    assert view.sql(f"select sum(n) as n from {table.sql}")["n"].to_pylist() == [4]


def test_a_table_that_the_point_does_not_name_raises_though_it_is_there(tmp_path: Path) -> None:
    write(tmp_path, "public.b", numbers(1))
    pin(tmp_path, 1, a=write(tmp_path, "public.a", numbers(1)))
    view = consistent_arrow(str(tmp_path))
    with pytest.raises(LakeError, match=r"0/1 does not hold public\.b"):
        view.table("public.b")
    with pytest.raises(ConfigError, match=r"public\.b"):
        view.sql("select * from public.b")
    with pytest.raises(LakeError, match="schema-qualified"):
        view.table("b")


def test_a_version_that_is_gone_raises_and_names_it(tmp_path: Path) -> None:
    write(tmp_path, "public.a", numbers(1))
    pin(tmp_path, 1, a=7)
    with pytest.raises(LakeError, match=r"version 7 of public\.a"):
        consistent_arrow(str(tmp_path)).table("public.a")


def test_a_failing_query_never_shows_a_value(tmp_path: Path) -> None:
    data = pa.table({"secret": ["do-not-show"]})
    pin(tmp_path, 1, a=write(tmp_path, "public.a", data))
    with pytest.raises(LakeError) as raised:
        consistent_arrow(str(tmp_path)).sql("select cast(secret as int) from public.a")
    assert "do-not-show" not in repr(raised.value)
    assert raised.value.__cause__ is None
    assert raised.value.__context__ is None


def test_wrong_sql_is_said_to_be_wrong(tmp_path: Path) -> None:
    pin(tmp_path, 1, a=write(tmp_path, "public.a", numbers(1)))
    with pytest.raises(ConfigError, match="No field named nope"):
        consistent_arrow(str(tmp_path)).sql("select nope from public.a")


def test_folder_that_is_no_lake_is_named(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=f"there is no lake at {tmp_path}"):
        consistent_arrow(str(tmp_path))


class SessionWithoutDelta:
    """A Spark session without settings for Delta, which `consistent_read` checks first."""

    @property
    def conf(self) -> SessionWithoutDelta:
        return self

    def get(self, key: str, default: str) -> str:
        return default


def test_a_session_without_delta_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    from pyspark.sql import SparkSession

    with pytest.raises(ToolError, match="without Delta"):
        consistent_read(cast("SparkSession", SessionWithoutDelta()), str(tmp_path))


def test_reading_without_spark_needs_no_pyspark() -> None:
    program = (
        "import sys; sys.modules['pyspark'] = None;"
        "from airflow_provider_pgrepl.replication.lake.read import arrow_as_of, consistent_arrow"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pipeline_or_a_path_says_where_the_lake_is(tmp_path: Path) -> None:
    pin(tmp_path, 10, a=write(tmp_path, "public.a", numbers(1)))
    pipeline = Pipeline(name="p", lake=str(tmp_path), tables=("public.a",))
    for lake in (pipeline, tmp_path, str(tmp_path)):
        assert consistent_arrow(lake, "0/A").table("public.a")["n"].to_pylist() == [1]
    with pytest.raises(ConfigError, match="is not an LSN"):
        consistent_arrow(pipeline, "ten")


def test_views_have_short_names_and_never_the_same() -> None:
    tables = ("public.orders", "sales.orders", '"My Shop"."Order items"')
    assert view_names(tables, "", {}) == {
        "public.orders": "orders",
        "sales.orders": "sales_orders",
        '"My Shop"."Order items"': "`My Shop_Order items`",
    }
    assert view_names(("public.orders",), "shop_", {}) == {"public.orders": "shop_orders"}
    assert view_names(tables[:2], "p_", {"sales.orders": "sold"})["sales.orders"] == "sold"
    with pytest.raises(ConfigError, match=r'one view name: public\."Sales_Orders" and sales\.orders'):
        view_names(('public."Sales_Orders"', "sales.orders"), "", {})
    with pytest.raises(ConfigError, match=r"not a table here: public\.other"):
        view_names(tables, "", {"public.other": "x"})


def test_only_tables_whose_name_is_a_word_of_the_query_are_opened() -> None:
    """Another table's error must not fail the query."""
    opened: list[str] = []

    def source(name: str) -> pa.Table:
        opened.append(name)
        return pa.table({"n": [1]})

    names = ["public.orders", "public.order", "public.ord$er", 'public."Text"', "public.ers"]
    for sql in ("select * from orders", 'select 1 from "Text", public.orders'):
        with sql_reader(sql, names, source, "now") as reader:
            reader.read_all()
    assert opened == ["public.orders", "public.orders", 'public."Text"']
