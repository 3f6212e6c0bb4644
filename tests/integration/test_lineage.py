"""The lineage of recorded tables. tests/airflow/test_lineage.py shows it in OpenLineage's events."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from airflow_provider_pgrepl.replication.app.access import Access
from airflow_provider_pgrepl.replication.app.lineage import dataset_name, read_lineage
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import server_and_database
from airflow_provider_pgrepl.replication.state.database import StateDatabase
from tests.support.recorded import Recorded


@pytest.mark.parametrize(
    ("uri", "names"),
    [
        ("/srv/lake/public/a", ("file", "/srv/lake/public/a")),
        ("file:///srv/lake/public/a", ("file", "/srv/lake/public/a")),
        ("s3://lakes/shop/public/a", ("s3://lakes", "shop/public/a")),
        (
            "abfss://lakes@shop.dfs.core.windows.net/a",
            ("abfss://lakes@shop.dfs.core.windows.net", "a"),
        ),
    ],
)
def test_table_has_the_name_of_its_kind_of_store(uri: str, names: tuple[str, str]) -> None:
    assert dataset_name(uri) == names


@pytest.mark.parametrize(
    ("dsn", "server"),
    [
        ("host=db port=6432 dbname=shop user=app", (("db", "6432"), "shop")),
        ("host=db,standby port=5432,5433 user=app", (("db", "5432"), "app")),
        ("postgresql:///shop?host=/run/postgresql", (("localhost", "5432"), "shop")),
    ],
)
def test_source_is_named_by_its_first_host(dsn: str, server: object) -> None:
    assert server_and_database(dsn) == server


def test_removed_tables_have_no_lineage(dsn: str, pg: Any) -> None:
    pg.cursor().execute("create table a (id int primary key); create table gone (id int primary key)")
    shop = Recorded(dsn)
    with shop.access.state_db("test") as state_db:
        state_db.remove_table("shop", TableName("public", "gone"))
    [table] = read_lineage(shop.access)
    assert table.source.name.endswith(".public.a")
    assert read_lineage(shop.access, [TableName("public", "gone")]) == []


def test_without_lake_tables_the_changelog_gets_the_rows(dsn: str, pg: Any) -> None:
    pg.cursor().execute("create table a (id int primary key); create table b (id int primary key)")
    shop = Recorded(dsn, lake="/srv/lake")
    access = replace(shop.access, pipeline=replace(shop.pipeline, lake_tables="none"))
    assert {one.name for table in read_lineage(access) for one in table.lake} == {
        "/srv/lake/_pgrepl/changelog"
    }


def test_before_the_first_snapshot_nothing_is_read_and_nothing_created(dsn: str) -> None:
    pipeline = Pipeline(name="shop", lake="/srv/lake", tables=("public.*",))
    assert read_lineage(Access(pipeline, dsn, dsn)) == []
    with StateDatabase(dsn, "test") as state_db:
        assert not state_db.is_set_up()
