"""The SQL of the connection page makes a role that can begin a pipeline, on a real server."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import psycopg2.extensions

from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline
from airflow_provider_pgrepl.replication.source.connection import connect
from airflow_provider_pgrepl.replication.source.preflight.check import check_source
from airflow_provider_pgrepl.replication.source.publication import create_publication

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "connection.md"
SHOP = Pipeline(name="shop", lake="/lake", tables=("public.*",))


def test_the_role_that_the_page_makes_can_begin(dsn: str, pg: Any) -> None:
    [block] = re.findall(r"```sql\n(CREATE ROLE replicator.*?)```", PAGE.read_text("utf-8"), re.DOTALL)
    database = psycopg2.extensions.parse_dsn(dsn)["dbname"]
    names = {"shop_owner": f"{database}_owner", "replicator": f"{database}_r"}
    with pg.cursor() as cursor:
        cursor.execute(f"create role {names['shop_owner']}")
        cursor.execute(
            f"create table orders (id int primary key); alter table orders owner to {names['shop_owner']}"
        )
        for name, own in {**names, "DATABASE shop": f"DATABASE {database}"}.items():
            block = block.replace(name, own)
        cursor.execute(block)
    try:
        as_replicator = psycopg2.extensions.make_dsn(dsn, user=names["replicator"], password="…")
        relations = check_source(as_replicator, SHOP)
        assert [str(relation.table) for relation in relations] == ["public.orders"]
        create_publication(connect(as_replicator, "test"), "pub", relations)
    finally:
        with pg.cursor() as cursor:
            for role in names.values():
                cursor.execute(f"drop owned by {role} cascade; drop role {role}")
