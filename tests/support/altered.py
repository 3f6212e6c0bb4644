"""A table that is copied, then altered and changed, and its lake table, without Spark."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from airflow_provider_pgrepl.replication.lake.apply.table_merge import TableResult
from airflow_provider_pgrepl.replication.postgres.names import TableName
from airflow_provider_pgrepl.replication.postgres.relation import Relation
from airflow_provider_pgrepl.replication.source.event_trigger import trigger
from tests.support.handed import Handed
from tests.support.replicated import plain, quoted

T = "public.t"


class Altered(Handed):
    """One table, copied, then altered and changed."""

    def __init__(self, dsn: str, folder: Path, **options: Any) -> None:
        super().__init__(dsn, folder, (T,), **options)
        self.relation: Relation | None = None

    def take(self) -> Altered:
        if self.pipeline.event_trigger:
            with self.source() as source:
                trigger.install(source, self.pipeline)
        self.relation = self.copy(T)
        return self

    def follow(self) -> TableResult:
        assert self.relation is not None
        return self.stream(self.relation)

    def bring(self) -> TableResult:
        """Apply the changes received so far to the lake table, without receiving more."""
        assert self.relation is not None
        return self.hand(self.relation)

    def rows(self, uri: str | None = None, version: int | None = None) -> pa.Table:
        table = DeltaTable(uri or self.lake_path(T), version=version)
        return pa.table(QueryBuilder().register("t", table).execute("select * from t").read_all())

    def values(self, *names: str) -> list[tuple[Any, ...]]:
        found = self.rows().select(list(names))
        return sorted(zip(*(column.to_pylist() for column in found.columns), strict=True), key=repr)

    def assert_as_source(self) -> None:
        assert_as_source(self, T)


def assert_as_source(lake: Handed, table: str) -> None:
    """Assert that the lake equals the source in all columns that the source has, row for row."""
    name = TableName.parse(table).sql
    with lake.source() as source, source.cursor() as cursor:
        cursor.execute(f"select * from {name} limit 0")
        columns = [column.name for column in cursor.description]
        cursor.execute(f"select {', '.join(map(quoted, columns))} from {name}")
        expected = Counter(tuple(map(plain, row)) for row in cursor.fetchall())
    rows = pa.table(lake.lake_rows(table)).select(columns)
    found = Counter(zip(*(map(plain, column.to_pylist()) for column in rows.columns), strict=True))
    assert found == expected, table


def done(result: TableResult) -> TableResult:
    assert result.error is None, result.error
    return result
