"""settings/lake.py and the SQL of catalogs/spark_catalog.py: which names a lake table can get."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_pgrepl.errors import ConfigError, LakeError
from airflow_provider_pgrepl.replication.catalogs.spark_catalog import catalog_entries, catalog_sql
from airflow_provider_pgrepl.replication.lake.consistent_points import ConsistentPoint, ConsistentPoints
from airflow_provider_pgrepl.replication.postgres.lsn import LSN, Epoch
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

HISTORY_AND_TABLE = ("public.orders~history", "public.orders_history")


def pipeline(lake: Path, *tables: str, **options: Any) -> Pipeline:
    found = Pipeline(name="shop", lake=str(lake), tables=("public.*",), **options)
    if tables:
        ConsistentPoints(found.lake_root).append(
            ConsistentPoint(Epoch(1), LSN(1), datetime.now(UTC), dict.fromkeys(tables, 0))
        )
    return found


def test_tables_and_histories_have_a_database_and_a_name(tmp_path: Path) -> None:
    tables = ("public.orders", "public.orders~history", '"My Sales"."Ä b"')
    assert catalog_sql(pipeline(tmp_path, *tables)) == [
        "CREATE DATABASE IF NOT EXISTS `shop`;",
        "CREATE TABLE IF NOT EXISTS `shop`.`my_sales_u00e4_b` USING DELTA LOCATION"
        f" 'file://{tmp_path}/My~20Sales/~C3~84~20b';",
        "CREATE TABLE IF NOT EXISTS `shop`.`public_orders` USING DELTA LOCATION"
        f" 'file://{tmp_path}/public/orders';",
        "CREATE TABLE IF NOT EXISTS `shop`.`public_orders_history` USING DELTA LOCATION"
        f" 'file://{tmp_path}/public/orders~history';",
    ]


def test_templates_and_other_names_are_the_pipelines(tmp_path: Path) -> None:
    chosen = pipeline(
        tmp_path,
        "public.orders",
        "crm.orders",
        "crm.orders~history",
        'public."Orders"',
        target_database="{pipeline}_{schema}",
        target_table="{table}_v1",
        target_schemas={"public": "main"},
        target_tables={'public."Orders"': "other_orders"},
    )
    entries, faults = catalog_entries(chosen)
    assert faults == []
    assert [(one.database, one.table, one.uri.removeprefix(str(tmp_path))) for one in entries] == [
        ("shop_crm", "orders_v1", "/crm/orders"),
        ("shop_crm", "orders_v1_history", "/crm/orders~history"),
        ("shop_main", "orders_v1", "/public/orders"),
        ("shop_main", "other_orders", "/public/Orders"),
    ]


@pytest.mark.parametrize(
    "both", [("crm.orders", "public.orders"), ('public."Orders"', "public.orders"), HISTORY_AND_TABLE]
)
def test_two_that_would_get_one_name_get_none_and_the_others_do(
    tmp_path: Path, both: tuple[str, str]
) -> None:
    chosen = pipeline(tmp_path, *both, "public.items", target_table="{table}")
    entries, [fault] = catalog_entries(chosen)
    assert [one.table for one in entries] == ["items"]
    assert all(one in fault for one in both)
    assert catalog_sql(chosen)[0] == f"-- not registered: {fault}"


def test_names_of_another_script_do_not_look_alike(tmp_path: Path) -> None:
    entries, faults = catalog_entries(pipeline(tmp_path, 'public."заказы"', 'public."клиенты"'))
    assert faults == []
    assert len({one.table for one in entries}) == 2
    assert all(one.table.isascii() for one in entries)


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
        ({"target_schemas": {"public": 3}}, "target_schemas.public: 3 must be a string"),
        ({"target_tables": {"orders": "o"}}, "target_tables: .*schema-qualified"),
        ({"target_tables": {"public.orders": ""}}, "is empty"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        pipeline(tmp_path, **options)
