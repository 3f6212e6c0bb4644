"""catalog_names.py and the SQL of lake/catalog.py: which name a lake table gets, and which it cannot get."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.config import Pipeline
from airflow_provider_pgrepl.replication.lake.catalog import catalog_sql
from airflow_provider_pgrepl.replication.lake.points import ConsistentPoint, Points
from airflow_provider_pgrepl.replication.lsn import LSN, Epoch


def pipeline(lake: Path, *tables: str, **options: Any) -> Pipeline:
    found = Pipeline(name="shop", lake=str(lake), tables=("public.*",), **options)
    if tables:
        Points(found.lake_root).append(
            ConsistentPoint(Epoch(1), LSN(1), datetime.now(UTC), dict.fromkeys(tables, 0))
        )
    return found


def test_tables_and_histories_have_a_database_and_a_name(tmp_path: Path) -> None:
    assert catalog_sql(pipeline(tmp_path, "public.orders", "public.orders~history", '"My Sales"."Ä b"')) == [
        "CREATE DATABASE IF NOT EXISTS shop;",
        f"CREATE TABLE IF NOT EXISTS shop.my_sales__b USING DELTA LOCATION"
        f" 'file://{tmp_path}/My~20Sales/~C3~84~20b';",
        f"CREATE TABLE IF NOT EXISTS shop.public_orders USING DELTA LOCATION 'file://{tmp_path}/public/orders';",
        f"CREATE TABLE IF NOT EXISTS shop.public_orders_history USING DELTA LOCATION"
        f" 'file://{tmp_path}/public/orders~history';",
    ]


def test_templates_and_names_of_schemas_are_the_pipelines(tmp_path: Path) -> None:
    options = {
        "target_database": "{pipeline}_{schema}",
        "target_table": "t_{table}",
        "target_schemas": {"public": "main"},
    }
    said = catalog_sql(pipeline(tmp_path, "public.orders", "crm.orders", **options), "trino")
    assert said == [
        "CREATE SCHEMA IF NOT EXISTS shop_crm;",
        "CREATE SCHEMA IF NOT EXISTS shop_main;",
        "CALL system.register_table(schema_name => 'shop_crm', table_name => 't_orders',"
        f" table_location => '{tmp_path}/crm/orders');",
        "CALL system.register_table(schema_name => 'shop_main', table_name => 't_orders',"
        f" table_location => '{tmp_path}/public/orders');",
    ]


def test_two_tables_never_get_one_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"(?s)crm\.orders and public\.orders.*target_schemas"):
        catalog_sql(pipeline(tmp_path / "a", "public.orders", "crm.orders", target_table="{table}"))
    with pytest.raises(ConfigError, match="one name"):
        catalog_sql(pipeline(tmp_path / "b", "public.orders", 'public."Orders"'))


def test_without_a_point_nothing_is_known(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="no consistent point yet"):
        catalog_sql(pipeline(tmp_path))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"target_table": "orders"}, r"target_table: 'orders' lacks \{table\}"),
        ({"target_table": "{table"}, "target_table: '{table' is no template"),
        (
            {"target_table": "{table}{colour}"},
            r"has \{colour\}; there are \{pipeline\}, \{schema\}, \{table\}",
        ),
        ({"target_database": "{schema!r}"}, "has a format"),
        ({"target_database": "{0}"}, r"has \{0\}"),
        ({"target_schemas": {"public": 3}}, "target_schemas: the name of 'public' must be a string"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        pipeline(tmp_path, **options)
