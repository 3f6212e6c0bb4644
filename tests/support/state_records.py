"""A pipeline and a table that tests of the state record."""

from __future__ import annotations

from typing import Any

from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Column, Relation
from airflow_provider_pgrepl.replication.settings.pipeline import Pipeline

T = TableName("public", 'odd "name')
RELATION = Relation(5, T, (Column("a", 1, 23, -1, "integer", is_key=True),), relfilenode=7)


def pipeline(name: str = "shop", **more: Any) -> Pipeline:
    return Pipeline(name=name, tables=("public.*",), **{"lake": f"/lake/{name}", **more})
